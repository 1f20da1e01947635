"""What a user did that cannot be run, said in one line."""


class RunError(ValueError):
    """A notebook, preset, parameter or folder that does not fit; `str` is one line."""

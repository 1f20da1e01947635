"""The one place that knows folders.

Nothing in the project depends on the working directory: folders are found from the checkout,
which is `JAGGED_HOME` when that is set, else the folder above this package that holds
`notebooks/` and `pyproject.toml`. They are looked up when they are used, so that an installed
wheel without a checkout imports cleanly and says what is missing only where it is needed.

ROOT       the checkout
NOTEBOOKS  the notebooks and their presets
FIGURES    committed results and the figures drawn from them, one folder a notebook
RUNS       results of runs on this machine: RUNS / preset / notebook (never committed)
BUILD      everything that may be deleted at any time: `JAGGED_BUILD`, else `build/` in the checkout
CACHE      content-keyed results of expensive calls
DATA       where public click logs are looked for: `CLICK_DATA_DIR`, else `data/` in the checkout,
           else `shared/data` beside it
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT: Path
NOTEBOOKS: Path
FIGURES: Path
RUNS: Path
BUILD: Path
CACHE: Path
DATA: Path


DATA_VARIABLE = "CLICK_DATA_DIR"
HOME_VARIABLE = "JAGGED_HOME"
BUILD_VARIABLE = "JAGGED_BUILD"


class NoCheckoutError(FileNotFoundError):
    """There is no checkout of the project to work in."""


def is_checkout(folder: Path) -> bool:
    """Whether `folder` is the top of a checkout of this project."""
    return (folder / "notebooks").is_dir() and (folder / "pyproject.toml").is_file()


def find_root() -> Path:
    """The top of the checkout, or NoCheckoutError with one line that says what to do."""
    if home := os.environ.get(HOME_VARIABLE):
        folder = Path(home).expanduser().resolve()
        if is_checkout(folder):
            return folder
        raise NoCheckoutError(f"JAGGED_HOME={home}: no notebooks/ and pyproject.toml there")
    for folder in Path(__file__).resolve().parents:
        # A virtual environment may lie in somebody's project that has notebooks, too.
        if is_checkout(folder) and (folder / "src" / "jagged_ranking").is_dir():
            return folder
    raise NoCheckoutError(
        "no checkout of the project above the installed package; set JAGGED_HOME to one"
    )


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError that names no file names `path`: of a disk that is full none does."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def shown(path: Path) -> str:
    """A path as it is printed: relative where it lies below the working directory."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def _data() -> Path:
    if folder := os.environ.get(DATA_VARIABLE):
        return Path(folder).expanduser().resolve()
    own, beside = find_root() / "data", find_root().parent / "shared" / "data"
    return own if own.is_dir() or not beside.is_dir() else beside


def _build() -> Path:
    if folder := os.environ.get(BUILD_VARIABLE):
        return Path(folder).expanduser().resolve()
    return find_root() / "build"


def settle_build(out: Path) -> None:
    """Have BUILD be `out`/build, here and in processes begun from here, where a checkout is only
    read.

    Tried by writing, so that it is known before hours of work and not after.
    """
    build = _build()
    try:
        build.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=build):
            return
    except OSError:
        os.environ[BUILD_VARIABLE] = str(out.resolve() / "build")


_FOLDERS: dict[str, Callable[[], Path]] = {
    "ROOT": find_root,
    "NOTEBOOKS": lambda: find_root() / "notebooks",
    "FIGURES": lambda: find_root() / "figures",
    "RUNS": lambda: find_root() / "figures" / "runs",
    "BUILD": _build,
    "CACHE": lambda: _build() / "cache",
    "DATA": _data,
}


def __getattr__(name: str) -> Path:
    if name in _FOLDERS:
        return _FOLDERS[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The one place that knows folders.

In a checkout nothing depends on the working directory: folders are found from the checkout, which
is `JAGGED_HOME` when that is set, else the folder above this package that holds `notebooks/` and
`pyproject.toml`. A wheel that is installed elsewhere brings its notebooks along; results and data
then lie below the folder that the user stands in, and what may be deleted where this platform keeps
caches. Folders are looked up when they are used.

ROOT       the checkout; without one the installed package, which nobody writes into
NOTEBOOKS  the notebooks and their presets
WORK       what the next two lie in: the checkout; without one `JAGGED_WORK`, else the working
           directory
FIGURES    committed results and the figures drawn from them, one folder a notebook
RUNS       results of runs on this machine: RUNS / preset / notebook (never committed)
BUILD      everything that may be deleted at any time: `JAGGED_BUILD`, else `build/` in the
           checkout; without one the user's cache folder
CACHE      content-keyed results of expensive calls
DATA       where public click logs are looked for: `CLICK_DATA_DIR`, else `data/` in WORK; of a
           checkout without that, `shared/data` beside it
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT: Path
NOTEBOOKS: Path
WORK: Path
FIGURES: Path
RUNS: Path
BUILD: Path
CACHE: Path
DATA: Path


DATA_VARIABLE = "CLICK_DATA_DIR"
HOME_VARIABLE = "JAGGED_HOME"
BUILD_VARIABLE = "JAGGED_BUILD"
WORK_VARIABLE = "JAGGED_WORK"
DISTRIBUTION = "jagged-flash-attention"

# The folders of a checkout that hold code, and the package in each.
CODE = {"kernels": "jagged_kernels", "src": "jagged_ranking", "data_prep": "click_data"}


class NoCheckoutError(FileNotFoundError):
    """There is neither a checkout of the project nor a package with notebooks to work with."""


def is_checkout(folder: Path) -> bool:
    """Whether `folder` is the top of a checkout of this project."""
    return (folder / "notebooks").is_dir() and (folder / "pyproject.toml").is_file()


def find_root() -> Path:
    """The top of the checkout, else the installed package if it has notebooks; or NoCheckoutError
    with one line that says what to do."""
    if home := os.environ.get(HOME_VARIABLE):
        folder = Path(home).expanduser().resolve()
        if is_checkout(folder):
            return folder
        raise NoCheckoutError(f"JAGGED_HOME={home}: no notebooks/ and pyproject.toml there")
    for folder in Path(__file__).resolve().parents:
        # A virtual environment may lie in somebody's project that has notebooks, too.
        if is_checkout(folder) and (folder / "src" / "jagged_ranking").is_dir():
            return folder
    if (_package() / "notebooks").is_dir():
        return _package()
    raise NoCheckoutError(
        "no checkout of the project above the installed package; set JAGGED_HOME to one"
    )


def has_checkout() -> bool:
    """Whether ROOT is a checkout, not an installed package."""
    return find_root() != _package()


def _package() -> Path:
    return Path(__file__).resolve().parent


def code_files(root: Path, name: str) -> Iterator[tuple[str, Path]]:
    """The Python files of one file or folder of code, in order, each with its path in a checkout.

    Args:
        root: a checkout, or the installed package, whose files have the same paths here.
        name: the file or folder, relative to a checkout, e.g. "kernels" or "src/jagged_ranking".
    """
    if root == _package():
        folder, _, rest = name.partition("/")
        base = root.parent
        place = base / (rest or CODE[folder])
        prefix = f"{folder}/"
    else:
        base, place, prefix = root, root / name, ""
    for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
        yield prefix + path.relative_to(base).as_posix(), path


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


def _work() -> Path:
    if has_checkout():
        return find_root()
    return Path(os.environ.get(WORK_VARIABLE) or Path.cwd()).expanduser().resolve()


def _data() -> Path:
    if folder := os.environ.get(DATA_VARIABLE):
        return Path(folder).expanduser().resolve()
    own, beside = _work() / "data", find_root().parent / "shared" / "data"
    return beside if has_checkout() and beside.is_dir() and not own.is_dir() else own


def _build() -> Path:
    if folder := os.environ.get(BUILD_VARIABLE):
        return Path(folder).expanduser().resolve()
    if has_checkout():
        return find_root() / "build"
    from platformdirs import user_cache_path

    return user_cache_path(DISTRIBUTION, appauthor=False)


def settle_build(out: Path) -> None:
    """Have BUILD be `out`/build, here and in processes begun from here, where its own place is only
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
    "WORK": _work,
    "FIGURES": lambda: _work() / "figures",
    "RUNS": lambda: _work() / "figures" / "runs",
    "BUILD": _build,
    "CACHE": lambda: _build() / "cache",
    "DATA": _data,
}


def __getattr__(name: str) -> Path:
    if name in _FOLDERS:
        return _FOLDERS[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

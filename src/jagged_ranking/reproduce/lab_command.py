"""`jagged lab`: JupyterLab on the notebooks."""

import argparse
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from jagged_ranking import paths
from jagged_ranking.reproduce.errors import RunError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `jagged lab`."""
    parser.add_argument("--port", type=int, default=8888, help="default: %(default)s")
    parser.add_argument(
        "--ip",
        default="localhost",
        help="where to listen; 0.0.0.0 for a container whose port is published (%(default)s)",
    )
    parser.add_argument("--no-browser", action="store_true", help="open no browser")


def run(arguments: argparse.Namespace) -> NoReturn:
    """`jagged lab`: this process becomes JupyterLab."""
    from jagged_ranking.reproduce.plan import variables_from_here

    if importlib.util.find_spec("jupyterlab") is None:
        raise RunError("JupyterLab is not installed: pip install jupyterlab")
    folder = working_notebooks()
    command = lab_command(
        folder,
        ip=arguments.ip,
        port=arguments.port,
        browser=not arguments.no_browser,
        root=os.geteuid() == 0,
    )
    print(f"notebooks: {paths.shown(folder)}")
    print("open the address with a token that JupyterLab prints below; Ctrl-C stops it", flush=True)
    # Kernels stand in the folder of notebooks; results go to where the user stands.
    os.execve(sys.executable, command, {**os.environ, **variables_from_here()})


def working_notebooks() -> Path:
    """The folder of notebooks to work in: the checkout's, else `notebooks` in the working folder,
    into which those of the wheel are copied that are not there yet; each is named."""
    if paths.has_checkout():
        return paths.NOTEBOOKS
    from jagged_ranking.results import atomic  # pandas: not for the help

    folder = paths.WORK / "notebooks"
    folder.mkdir(exist_ok=True)
    for source in sorted(paths.NOTEBOOKS.glob("*.ipynb")):
        target = folder / source.name
        if target.exists():
            print(f"yours    {paths.shown(target)}")
        else:
            # Half a notebook would be taken for the user's own the next time.
            with paths.naming(target), atomic(target) as temporary:
                shutil.copyfile(source, temporary)
            print(f"copied   {paths.shown(target)}")
    return folder


def lab_command(folder: Path, *, ip: str, port: int, browser: bool, root: bool) -> list[str]:
    """The command line of JupyterLab on a folder.

    Args:
        folder: of the notebooks.
        ip: the address that it listens at.
        port: the first one to try.
        browser: whether to open one.
        root: whether the user is root, as in a container: JupyterLab wants that to be allowed.
    """
    return [
        *(sys.executable, "-m", "jupyterlab", str(folder), f"--ip={ip}", f"--port={port}"),
        *([] if browser else ["--no-browser"]),
        *(["--allow-root"] if root else []),
    ]

"""Executing one notebook with papermill, in a kernel of this very interpreter."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill import execute_notebook
from papermill.exceptions import PapermillExecutionError
from papermill.iorw import LocalHandler, papermill_io
from papermill.log import logger as papermill_logger

from jagged_ranking import paths
from jagged_ranking.processes import PARENT_VARIABLE, temporary_folder
from jagged_ranking.reproduce.parameters import TAG, read_cells
from jagged_ranking.reproduce.progress import Progress
from jagged_ranking.results import atomic
from jagged_ranking.verbosity import is_verbose

# A socket's path may have 103 characters (macOS) or 107 (Linux); a kernel's are called so.
_LONGEST = 103 - len("/kernel-ipc-5")

# ipykernel looks for its parent too, but takes whom it finds for it when it has come up: where
# orphans go to a session's manager, a kernel that was starting as its parent was killed stays.
_LAUNCH = """\
from jagged_ranking.processes import end_with_parent
end_with_parent()
import runpy
runpy.run_module("ipykernel_launcher", run_name="__main__")
"""


class _Whole(LocalHandler):
    """Writes as papermill does, which it does after every cell, but whole or not at all."""

    def write(self, buf: str, path: str) -> None:
        with atomic(path) as temporary:
            temporary.write_text(buf, encoding="utf-8")


@contextlib.contextmanager
def _neutral_kernel(variables: Mapping[str, str]) -> Iterator[tuple[type, str]]:
    """A kernel manager class for this interpreter, and an empty folder to work in.

    No installed kernelspec is asked: `python3` there may be another environment's.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}
    with temporary_folder("jagged-kernel-", longest=_LONGEST) as folder:
        # What goes wrong in a cell is in the notebook; the kernel's log would only add tracebacks
        # of an interrupt. jupyter_client fills in the connection file.
        quiet = [] if is_verbose() else ["--log-level=CRITICAL"]
        launcher = [sys.executable, "-c", _LAUNCH, *quiet]
        spec = KernelSpec(
            argv=[*launcher, "-f", "{connection_file}"],
            display_name="this interpreter",
            language="python",
            env={
                PARENT_VARIABLE: str(os.getpid()),
                "IPYTHONDIR": str(folder),  # nobody's startup files
                "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # a warning of the debugger
                "MPLBACKEND": "module://matplotlib_inline.backend_inline",
                **variables,
            },
        )

        class ThisInterpreter(AsyncKernelManager):
            def __init__(self, **options: Any) -> None:
                # Sockets in the folder: no ports, nothing for others to listen in on.
                connection = f"{folder}/kernel.json"
                super().__init__(transport="ipc", connection_file=connection, **options)

            async def start_kernel(self, **options: Any) -> Any:
                # nbclient has just made a signal end the kernel while it goes on itself, into
                # pages of errors. Here a signal ends the run, and that the kernel.
                loop = asyncio.get_running_loop()
                loop.set_exception_handler(_tell_but_of_kernels)

                def end(number: int, frame: Any) -> None:
                    # The cell's task fails as its kernel goes: no news.
                    loop.set_exception_handler(lambda loop, context: None)
                    # `jagged reproduce`, which a terminal tells too, would interrupt the end.
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    handlers[number](number, frame)

                for number, handler in handlers.items():
                    if loop.remove_signal_handler(number):
                        signal.signal(number, end if callable(handler) else handler)
                with paths.naming(folder):
                    return await super().start_kernel(**options)

            @property
            def kernel_spec(self) -> KernelSpec:
                return spec

        yield ThisInterpreter, str(folder)


def _tell_but_of_kernels(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """`execute` says that a kernel died; the cell's task, which nobody asks then, need not."""
    if not isinstance(context.get("exception"), DeadKernelError):
        loop.default_exception_handler(context)


def execute(
    notebook: Path,
    *,
    executed: Path,
    parameters: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    progress: bool = True,
) -> str:
    """Run a notebook, keep it with its outputs at `executed`, and return its error ("" if none).

    The error is one line: the cell (counted from 1 in the notebook as it is stored), how
    JupyterLab labels it in the executed notebook, its first line of code, and what it raised.
    """
    cells = read_cells(notebook)
    verbose = is_verbose()
    bar = Progress(notebook.stem, len(cells) + bool(parameters), shown=progress and not verbose)
    watcher = sys.stderr if verbose else bar
    executed.parent.mkdir(parents=True, exist_ok=True)
    papermill_io.register(str(executed), _Whole())
    papermill_logger.disabled = True  # every error is reported once, below
    try:
        with _neutral_kernel(environment or {}) as (manager, folder):
            execute_notebook(
                notebook,
                executed,
                dict(parameters),
                kernel_name="python3",
                language="python",
                progress_bar=False,
                stdout_file=watcher,
                stderr_file=watcher,
                coalesce_streams=True,  # a bar's refreshes would each be kept
                kernel_manager_class=manager,
                shutdown_kernel="immediate",  # all is written; a busy one would wait, then complain
                resources={"metadata": {"path": folder}},
                on_cell_start=bar.start,
                on_cell_complete=bar.finish,
            )
    except PapermillExecutionError as error:
        if verbose:
            print(*error.traceback, sep="\n", file=sys.stderr)
        number = _stored_number(error.cell_index, cells, bool(parameters))
        where = f"cell {number}, In [{error.exec_count}], `{_first_line(error.source)}`"
        what = f"{error.ename}: {error.evalue}"
    except (DeadKernelError, CellTimeoutError, RuntimeError) as error:
        number = _stored_number(bar.at_cell, cells, bool(parameters))
        where = f"cell {number}, `{_first_line(cells[number - 1].source)}`"
        what = "the kernel died" if isinstance(error, DeadKernelError) else str(error)
    else:
        return ""
    finally:
        bar.close()
    return " ".join(f"{where}: {what}".split())


def _stored_number(index: int, cells: list[Any], injected: bool) -> int:
    """The number, from 1, in the stored notebook of cell `index` of the executed one.

    papermill puts a cell with the given values right behind the parameters cell.
    """
    tagged = [i for i, cell in enumerate(cells) if TAG in cell.metadata.get("tags", [])]
    return index if injected and tagged and index > tagged[0] else index + 1


def _first_line(source: str) -> str:
    lines = [line.strip() for line in source.splitlines()]
    return next((line for line in lines if line and not line.startswith("#")), "")

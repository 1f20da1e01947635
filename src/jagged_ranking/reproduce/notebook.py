"""Executing one notebook with papermill, in a kernel of this very interpreter."""

import asyncio
import contextlib
import hashlib
import json
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill import execute_notebook
from papermill.exceptions import PapermillExecutionError
from papermill.log import logger as papermill_logger
from tqdm import tqdm

from jagged_ranking import paths
from jagged_ranking.processes import temporary_folder
from jagged_ranking.reproduce.errors import RunError
from jagged_ranking.reproduce.parameters import TAG, read_cells
from jagged_ranking.results import atomic

RECORD = "run.json"


# A socket's path may have 103 characters (macOS) or 107 (Linux); a kernel's are called so.
_LONGEST = 103 - len("/kernel-ipc-5")


@dataclass
class RunRecord:
    """How one run of a notebook went: `run.json` beside its results."""

    id: str
    status: str  # ok | failed
    key: str  # what the run depends on, see freshness.run_key
    parameters: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    started: str = ""  # UTC, ISO 8601
    seconds: float = 0.0
    error: str = ""  # where and what, one line
    drawing: str = ""  # what its figures were drawn by, see freshness.drawing_key

    def write(self, folder: Path) -> None:
        """Write the record into `folder`, whole or not at all."""
        with atomic(folder / RECORD) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def read_record(folder: Path) -> RunRecord | None:
    """The record of the last run into `folder`; None when there is none that can be read."""
    try:
        return RunRecord(**json.loads((folder / RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def notebook_ids(folder: Path) -> list[str]:
    """The ids of the notebooks in a folder, in order."""
    return sorted(path.stem for path in folder.glob("*.ipynb"))


def find_notebook(name: str) -> Path:
    """A notebook by path, by id (`01_speed`) or by the number or text its id begins with."""
    path = Path(name).expanduser()
    if path.suffix == ".ipynb":
        if not path.is_file():
            raise RunError(f"{name}: no such notebook")
        return path.resolve()
    folder = paths.NOTEBOOKS
    known = notebook_ids(folder)
    matches = [name] if name in known else [i for i in known if i.startswith(name)]
    if len(matches) != 1:
        which = "names more than one notebook" if matches else "is not a notebook"
        raise RunError(f"`{name}` {which}; there is {', '.join(known)}")
    return folder / f"{matches[0]}.ipynb"


def source_digest(notebook: Path) -> str:
    """sha256 over the cells' kinds, tags and sources: outputs and metadata do not count."""
    cells = read_cells(notebook)
    content = [[c.cell_type, c.metadata.get("tags", []), c.source] for c in cells]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class _Progress:
    """One bar for a notebook: its cells, and behind them the last line that the kernel wrote.

    The second half is how the bars of long measurements inside a cell are seen from a terminal.
    """

    def __init__(self, name: str, cells: int, *, shown: bool) -> None:
        self.at_cell = 0
        interactive = sys.stderr.isatty()
        self.bar = tqdm(
            total=cells,
            unit="cell",
            disable=not shown,
            # A log file keeps every refresh as a line.
            mininterval=0.2 if interactive else 15.0,
            dynamic_ncols=interactive,
            bar_format=f"{name}: {{n_fmt}}/{{total_fmt}} cells [{{elapsed}}] {{bar:20}} {{desc}}",
        )

    def start(self, cell: Any, cell_index: int) -> None:
        """Before a cell: show the heading that it stands under."""
        self.at_cell = cell_index
        if cell.cell_type == "markdown" and cell.source.strip():
            self.show(cell.source.strip().splitlines()[0].strip("# "))

    def finish(self, cell: Any, cell_index: int) -> None:
        """After a cell: count it."""
        self.bar.update(cell_index + 1 - self.bar.n)

    def write(self, text: str) -> None:
        """Take what the kernel wrote to its stderr (a file to papermill)."""
        lines = [line.strip() for line in text.replace("\r", "\n").splitlines()]
        if last := next((line for line in reversed(lines) if line), ""):
            self.show(last)
            self.bar.update(0)

    def show(self, text: str) -> None:
        self.bar.set_description_str(text[:60], refresh=False)

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Leave the bar without the last line's rest."""
        self.show("")
        self.bar.close()


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
        launcher = [sys.executable, "-m", "ipykernel_launcher", "--log-level=CRITICAL"]
        spec = KernelSpec(
            argv=[*launcher, "-f", "{connection_file}"],
            display_name="this interpreter",
            language="python",
            env={
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
    bar = _Progress(notebook.stem, len(cells) + bool(parameters), shown=progress)
    executed.parent.mkdir(parents=True, exist_ok=True)
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
                stderr_file=bar,
                coalesce_streams=True,  # a bar's refreshes would each be kept
                kernel_manager_class=manager,
                shutdown_kernel="immediate",  # all is written; a busy one would wait, then complain
                resources={"metadata": {"path": folder}},
                on_cell_start=bar.start,
                on_cell_complete=bar.finish,
            )
    except PapermillExecutionError as error:
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

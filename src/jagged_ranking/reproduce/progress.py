"""What `jagged run` shows while a notebook runs: what is being done now, and how far that is."""

import re
import sys
import time
from typing import Any

from tqdm import tqdm

# "3 of 12, B": the studies name a batch or an operation before they measure it.
_PART = re.compile(r"^(\d+) of (\d+), ([^:]+)")
# "models:  33%|###       | 2/6 [00:12<00:24": a bar of tqdm.
_BAR = re.compile(r"^(?:(.*?): )?\s*\d+%\|[^|]*\|\s*(\d+)/(\d+) \[")
_KEPT = ": kept from "  # what `cache` says of a part that cost nothing
_ESCAPE = re.compile(r"\x1b\[\w")
PLAIN_SECONDS = 15.0  # between lines where there is no terminal: a log file keeps them all


class Progress:
    """One line for a notebook: the heading that it is at, and the part (a batch, a training) of how
    many, the time, and what is left of it.

    Parts are read from what the kernel writes. Of a cell without parts the notebook's cells are
    counted. What is left is of the parts alone, which are dear: each is taken to last as long as
    those before it that were not kept from an earlier run. On a terminal it is a bar, elsewhere a
    line now and then.
    """

    def __init__(self, name: str, cells: int, *, shown: bool) -> None:
        self.at_cell = 0
        self._name, self._cells, self._shown = name, cells, shown
        self._heading = self._outer = ""
        self._began = time.monotonic()
        self._told = -PLAIN_SECONDS
        self._rest = ""  # of a line that is not written to its end
        self._forget()
        terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=cells,
            desc=name,
            disable=not (shown and terminal),
            dynamic_ncols=True,
            leave=False,
            bar_format="{desc} |{bar:12}| [{elapsed}{postfix}]",
        )
        self._plain = shown and not terminal

    def start(self, cell: Any, cell_index: int) -> None:
        """Before a cell: note the heading that it stands under."""
        self.at_cell = cell_index
        if cell.cell_type == "markdown" and cell.source.startswith("#"):
            first = cell.source.splitlines()[0]
            self._heading = "" if first.startswith("# ") else first.strip("# ")  # not the title
        self._forget()
        self._tell()

    def finish(self, cell: Any, cell_index: int) -> None:
        """After a cell: its parts are done."""
        self._forget()

    def write(self, text: str) -> None:
        """Take what the kernel wrote to its stdout or stderr (a file to papermill)."""
        *lines, self._rest = (self._rest + text).replace("\r", "\n").split("\n")
        # A bar stays in its line, and a part is named before it is measured: neither has an end.
        seen = [self._read(_ESCAPE.sub("", line).strip()) for line in [*lines, self._rest]]
        if any(seen):
            self._tell()

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Leave no bar behind."""
        self._bar.close()

    def _forget(self) -> None:
        self._what, self._done, self._total = "", 0, 0
        self._costs: list[float] = []  # seconds of each part that was not kept
        self._free = False
        self._at = time.monotonic()
        self._outer, self._rest = "", ""

    def _read(self, line: str) -> bool:
        """Whether a line says how far it is."""
        if found := _PART.match(line):
            done, total, self._what = int(found[1]) - 1, int(found[2]), found[3]
            self._count(done, total)
            self._free = _KEPT in line
            return True
        if found := _BAR.match(line):
            bar = found[1] or ""
            self._outer = self._outer or f"{bar}|"
            if self._outer == f"{bar}|":
                self._what = self._what or bar
                self._count(int(found[2]), int(found[3]))
            else:  # a bar inside of that one
                self._what = bar
            return True
        return False

    def _count(self, done: int, total: int) -> None:
        now = time.monotonic()
        new = done - self._done if total == self._total else 0
        if new > 0 and not self._free:
            self._costs += [(now - self._at) / new] * new
        if new or total != self._total:
            self._at = now
        self._done, self._total = done, total

    def _left(self) -> float | None:
        """Seconds that the parts which are left will take; None where nothing is known yet."""
        if not self._costs or not self._total:
            return None
        each = sum(self._costs) / len(self._costs)
        return max(each * (self._total - self._done) - (time.monotonic() - self._at), 0.0)

    def line(self) -> str:
        """What is being done now."""
        words = [self._heading, self._what]
        if self._total:
            words.append(f"{self._done} of {self._total} done")
        else:
            words.append(f"cell {self.at_cell + 1} of {self._cells}")
        return f"{self._name}: {', '.join(word for word in words if word)}"

    def _tell(self) -> None:
        left = self._left()
        about = "" if left is None else f", about {tqdm.format_interval(left)} left"
        if self._plain:
            now = time.monotonic()
            if now - self._told >= PLAIN_SECONDS:
                self._told = now
                passed = tqdm.format_interval(now - self._began)
                print(f"{self.line()}, {passed} passed{about}", file=sys.stderr, flush=True)
            return
        self._bar.total = self._total or self._cells
        self._bar.n = self._done if self._total else self.at_cell
        self._bar.set_description_str(self.line(), refresh=False)
        self._bar.set_postfix_str(about.removeprefix(", "), refresh=False)
        self._bar.refresh()

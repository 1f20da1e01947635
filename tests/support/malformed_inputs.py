"""Inputs that `jagged` refuses, each with what it says: the table of `test_malformed_inputs.py`.

Each case takes a small well-formed input and breaks one thing of it. Bytes that are drawn come from
`SEED`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

SEED = 20240331
HEADER = ("user_id", "item_id", "timestamp", "label")
ROWS: list[tuple[str, ...]] = [
    (f"u{t % 3}", f"i{t % 5}", str(1_600_000_000 + 60 * t), str(t // 2 % 2)) for t in range(24)
]
BAD = 4  # the row that is broken; it stands in line 6 of text
USAGE = 2  # exit code of arguments that cannot be read; all else is 1

Write = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """A broken input, and how it is refused.

    name: what is broken.
    arguments: of `jagged`; "{in}" is the folder that `write` fills, "{out}" what is not there yet.
    expected: a part of the message, which is one line; all problems of one file are in that line,
        separated by "; ". Arguments that cannot be read (code 2) have the usage in a line before.
    """

    name: str
    arguments: tuple[str, ...]
    expected: str
    write: Write
    code: int = 1

    def run_with(self, folder: Path, out: Path) -> list[str]:
        """The arguments for a folder of inputs and a place to write."""
        places = (("{in}", str(folder)), ("{out}", str(out)))
        return [_placed(argument, places) for argument in self.arguments]


def prepare(source: str, path: str | None, *options: str) -> tuple[str, ...]:
    """Arguments of `jagged prepare`; `path` is of the inputs."""
    origin = () if path is None else ("--from", f"{{in}}/{path}")
    return ("prepare", source, *origin, "--out", "{out}", *options)


def text(
    rows: Sequence[Sequence[str]] = ROWS, header: Sequence[str] = HEADER, by: str = ","
) -> str:
    """A log as text."""
    return "".join(by.join(row) + "\n" for row in (header, *rows))


def rows_with(column: str, value: str, row: int = BAD) -> list[tuple[str, ...]]:
    """The rows, one field of which is another."""
    place = HEADER.index(column)
    rows = list(ROWS)
    rows[row] = (*rows[row][:place], value, *rows[row][place + 1 :])
    return rows


def file(name: str, content: str | bytes) -> Write:
    """Writes one file."""
    data = content.encode() if isinstance(content, str) else content

    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)

    return write


def log(
    name: str, content: str | bytes, expected: str, *options: str, path: str = "log.csv"
) -> Case:
    """A case of one file for `jagged prepare log`; `expected` follows its name."""
    arguments = prepare("log", path, *options)
    return Case(name, arguments, f"{{in}}/{path}: {expected}", file(path, content))


def all_cases() -> list[Case]:
    """The whole table."""
    import malformed_movielens
    import malformed_options
    import malformed_parquet
    import malformed_prepared
    import malformed_text

    rooms = (
        *(malformed_text, malformed_parquet, malformed_movielens),
        *(malformed_options, malformed_prepared),
    )
    return [case for room in rooms for case in room.cases()]


def _placed(argument: str, places: Sequence[tuple[str, str]]) -> str:
    for mark, place in places:
        argument = argument.replace(mark, place)
    return argument

"""Tables that hold lists, as rows of their elements."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import polars as pl

from click_data.table import Part, Table


def elements(table: Table, names: Sequence[str]) -> tuple[Table, pl.Series]:
    """A table with one row an element of the lists in columns `names`, and its row in `table`.

    The lists of one row must have one length; a missing list is empty. Raises DataError about what
    is not so. Problems noted in the new table are told by row and element.
    """
    lists = table.frame.select(names)
    for name, kind in lists.schema.items():
        if not isinstance(kind, pl.List | pl.Array):
            table.note(f"lists are needed, not {kind}", column=name)
    table.refuse()
    fixed = [name for name, kind in lists.schema.items() if isinstance(kind, pl.Array)]
    lists = lists.with_columns(pl.col(name).arr.to_list() for name in fixed)
    lengths = lists.select(pl.col(name).list.len().fill_null(0) for name in names)
    first, *others = names
    for name in others:
        message = f"the list has another length than that in column {first}"
        table.note(message, column=name, rows=(lengths[name] != lengths[first]).arg_true())
    table.refuse()
    numbered = lists.with_row_index("row").filter(lengths[first] > 0)
    frame = numbered.explode(names)
    row = frame["row"].cast(pl.Int64)
    place = frame.select(pl.int_range(pl.len()).over("row")).to_series()
    parts, begin = [], 0
    for part, held in zip(table.parts, _held(table.parts, lengths[first]), strict=True):
        mine = slice(begin, begin + held)
        parts.append(Part(part.file, held, _namer(part, row[mine], place[mine], table)))
        begin += held
    return replace(table, frame=frame.drop("row"), parts=tuple(parts), problems=[]), row


def _held(parts: Sequence[Part], lengths: pl.Series) -> list[int]:
    """How many elements the lists of each part have."""
    held, begin = [], 0
    for part in parts:
        held.append(int(lengths[begin : begin + part.rows].sum()))
        begin += part.rows
    return held


def _namer(
    part: Part, row: pl.Series, place: pl.Series, table: Table
) -> Callable[[Sequence[int]], list[str]]:
    """What names elements of one part, of which `row` counts over all parts of the table."""
    before = sum(other.rows for other in table.parts[: table.parts.index(part)])

    def name_rows(some: Sequence[int]) -> list[str]:
        # One by one: a text's lines are found for ascending rows only once each.
        return [f"{part.name_rows([row[i] - before])[0]}, element {place[i]}" for i in some]

    return name_rows

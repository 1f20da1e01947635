"""Results as one tidy table: a row is one measured quantity, and every figure reads this form.

Columns (all present, in this order):

    id        the notebook or run that measured it, e.g. "01_speed"
    op        what was measured: "attention", "schedule", "block_mask", "ceiling", "ranking", ...
    provider  who did it: "jagged", "dense_flash", ..., or a model's name
    workload  on what: a workload's or a dataset's name
    mode      "forward", "forward+backward", "train", "test", ...
    metric    "latency", "peak_memory", "peak_memory_minus_inputs", "max_abs_error", "auc", ...
    unit      "ms", "bytes", "1", ...
    value     the median of the samples, or the one value; NaN where status is not "ok"
    q10 q25 q75 q90   quantiles of the samples; NaN where there is one value only
    samples   every sample, list<float64>; empty where there is one value only
    status    "ok", "missing", "out_of_memory", "unsupported" or "error"
    message   one line on the status; empty where status is "ok"
    config    JSON object with sorted keys: shape, lengths, waste, dtype, seed, device, ...
    run_key   names the run that made the row
"""

import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

RESULTS = "results.parquet"  # the table, in a folder of results
STATUSES = ("ok", "missing", "out_of_memory", "unsupported", "error")
QUANTILES = {"q10": 0.10, "q25": 0.25, "q75": 0.75, "q90": 0.90}

SCHEMA = pa.schema(
    [
        *[(name, pa.string()) for name in ("id", "op", "provider", "workload", "mode")],
        *[(name, pa.string()) for name in ("metric", "unit")],
        *[(name, pa.float64()) for name in ("value", *QUANTILES)],
        ("samples", pa.list_(pa.float64())),
        *[(name, pa.string()) for name in ("status", "message", "config", "run_key")],
    ]
)
COLUMNS = tuple(SCHEMA.names)


def row(
    *,
    op: str,
    provider: str,
    workload: str,
    mode: str,
    metric: str,
    unit: str,
    value: float = math.nan,
    samples: Sequence[float] = (),
    status: str = "ok",
    message: str = "",
    config: Mapping[str, Any] | None = None,
    run_id: str = "",
    run_key: str = "",
) -> dict[str, Any]:
    """One row. `samples`, where given, decide `value` (their median) and the quantiles.

    Raises:
        ValueError: the status is not one of STATUSES, or an "ok" row has no number.
    """
    if status not in STATUSES:
        raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {status!r}")
    numbers = np.asarray(samples, dtype=np.float64)
    if numbers.size:
        value = float(np.median(numbers))
    if status == "ok" and math.isnan(value):
        raise ValueError(f"{op}/{provider}/{workload}/{metric} is 'ok' but has no value")
    quantiles = {
        name: float(np.quantile(numbers, at)) if numbers.size else math.nan
        for name, at in QUANTILES.items()
    }
    return {
        "id": run_id,
        "op": op,
        "provider": provider,
        "workload": workload,
        "mode": mode,
        "metric": metric,
        "unit": unit,
        "value": value,
        **quantiles,
        "samples": numbers.tolist(),
        "status": status,
        "message": " ".join(message.split()),
        "config": json.dumps(dict(config or {}), sort_keys=True),
        "run_key": run_key,
    }


def frame(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as a table with every column, also when there are none."""
    return pd.DataFrame(list(rows), columns=list(COLUMNS))


def with_config(table: pd.DataFrame, *keys: str) -> pd.DataFrame:
    """A copy with `keys` of the JSON config as columns of their own (None where absent)."""
    parsed = [json.loads(text) for text in table["config"]]
    added = {key: [config.get(key) for config in parsed] for key in keys}
    return table.assign(**added)


def select(table: pd.DataFrame, **wanted: str | Sequence[str]) -> pd.DataFrame:
    """The rows whose columns have the wanted value, or one of the wanted values."""
    keep = pd.Series(True, index=table.index)
    for column, values in wanted.items():
        keep &= table[column].isin([values] if isinstance(values, str) else list(values))
    return table.loc[keep, :]


def write(table: pd.DataFrame, path: Path | str) -> Path:
    """Write a table as Parquet: whole or not at all, the same bytes for the same table.

    Raises:
        ValueError: a column is missing or unknown.
    """
    path = Path(path)
    if set(table.columns) != set(COLUMNS):
        odd = sorted(set(table.columns) ^ set(COLUMNS))
        raise ValueError(f"{path}: results must have exactly the documented columns; see {odd}")
    columns = [
        pa.array(
            [None if _absent(cell) else cell for cell in table[field.name].tolist()],
            type=field.type,
        )
        for field in SCHEMA
    ]
    data = pa.Table.from_arrays(columns, schema=SCHEMA)
    with atomic(path) as temporary:
        pq.write_table(data, temporary, compression="zstd", version="2.6")
    return path


def read(path: Path | str) -> pd.DataFrame:
    """Read a table written by `write`.

    Raises:
        ValueError: the file is no Parquet file of this form; one line that names it.
    """
    try:
        data = pq.read_table(path)
    except pa.ArrowInvalid as error:
        first_line = str(error).splitlines()[0]
        raise ValueError(f"{path}: not a readable Parquet file: {first_line}") from error
    if missing := [name for name in COLUMNS if name not in data.column_names]:
        raise ValueError(f"{path}: not a results file, columns missing: {', '.join(missing)}")
    rows = data.select(list(COLUMNS)).to_pylist()
    table = frame(rows)
    for name in ("value", *QUANTILES):
        table[name] = table[name].astype("float64")
    return table


@contextmanager
def atomic(path: Path | str) -> Iterator[Path]:
    """`with atomic(path) as temporary:` gives a file beside `path` that replaces it at the end.

    If the block raises, `path` is as it was and the temporary file is gone.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    try:
        # mkstemp makes files that only their owner reads; results are for everybody.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        yield Path(name)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def _absent(cell: Any) -> bool:
    return cell is None or (isinstance(cell, float) and math.isnan(cell))

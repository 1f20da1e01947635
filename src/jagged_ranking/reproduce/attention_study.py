"""The batches that the notebooks measure, and measuring them so that little is lost."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch

from click_data import history_lengths
from jagged_ranking import paths, results
from jagged_ranking.measure.benchmark import measure_attention
from jagged_ranking.measure.ceilings import Ceilings, ceiling_table
from jagged_ranking.measure.workload_sets import (
    head_dim_sweep,
    length_sweep,
    skew_sweep,
    small_target_workloads,
    small_workloads,
    target_workloads,
    waste_sweep,
    with_options,
    workloads,
)
from jagged_ranking.measure.workloads import Workload
from jagged_ranking.reproduce.cache import cached
from jagged_ranking.reproduce.click_logs import describe_data, find_histories

SIZES = ("full", "small")
B = TypeVar("B")  # one batch to be measured


def study_batches(
    *,
    names: Sequence[str],
    size: str,
    wastes: Sequence[float],
    waste_users: int,
    waste_max_len: int,
    max_lens: Sequence[int],
    padded_tokens: int,
    head_dims: Sequence[int],
    heads: int,
    head_dim: int,
    data: str | None,
    histories: Sequence[str],
    data_users: int,
    device: str,
    seed: int,
    more: Sequence[Workload] = (),
) -> list[Workload]:
    """Self-attention: named workloads, real histories, and three sweeps.

    bf16 on a GPU, as models are trained there; float32 on a CPU.

    Args:
        names: of the workloads A-G and N (see `jagged_ranking.measure.workload_sets`).
        size: "full", or "small" for the same distributions at a size for a CPU.
        wastes: padding waste at each point of the first sweep, 0 to 1.
        waste_users: users in each batch of the first and the last sweep.
        waste_max_len: the longest history in each batch of the first and the last sweep.
        max_lens: the longest history at each point of the second sweep.
        padded_tokens: users times longest history at each point of the second sweep.
        head_dims: head_dim at each point of the third sweep, over one set of histories.
        heads: heads in the sweeps and the real batches.
        head_dim: head_dim there.
        data: a prepared dataset, whose histories make one batch more; None for none.
        histories: data sets whose histories make a batch each, see `find_histories`; one that is
            not at hand is left out, and that is said.
        data_users: users in each of those batches, drawn at random.
        device: "cuda" or "cpu".
        seed: of all lengths.
        more: batches behind these.

    Raises:
        ValueError: a name or size that there is not, or no batch at all.
    """
    shape = {**precision(device), "heads": heads, "seed": seed}
    wide = {**shape, "head_dim": head_dim}
    chosen = named_batches(names, size, device=device, seed=seed)
    chosen += real_batches(data, histories, data_users, **wide)
    if wastes:
        chosen += waste_sweep(wastes, users=waste_users, max_len=waste_max_len, **wide)
    if max_lens:
        chosen += length_sweep(max_lens, padded_tokens=padded_tokens, **wide)
    if head_dims:
        chosen += head_dim_sweep(head_dims, users=waste_users, max_len=waste_max_len, **shape)
    return some([*chosen, *more], "workloads, wastes, max_lens, head_dims, histories, data")


def target_batches(
    *,
    names: Sequence[str],
    size: str,
    skew_users: Sequence[int],
    skew_tokens: int,
    candidates: int,
    heads: int,
    head_dim: int,
    data: str | None,
    data_users: int,
    device: str,
    seed: int,
) -> list[Workload]:
    """Target attention: named workloads, real histories, and a sweep over the skew of lengths.

    Args:
        names: of the workloads T1 to T6 (see `jagged_ranking.measure.workload_sets`).
        size: "full", or "small" for the same distributions at a size for a CPU.
        skew_users: users in the batches of the sweep, three batches each.
        skew_tokens: events in each batch of the sweep.
        candidates: queries a user in the sweep and for the real histories.
        heads: heads there.
        head_dim: head_dim there.
        data: a prepared dataset, whose histories make one batch more; None for none.
        data_users: users in that batch, drawn at random.
        device: "cuda" or "cpu".
        seed: of all lengths.

    Raises:
        ValueError: a name or size that there is not, or no batch at all.
    """
    shape = {**precision(device), "heads": heads, "head_dim": head_dim, "seed": seed}
    shape["queries"] = candidates
    sets = (target_workloads, small_target_workloads)
    chosen = named_batches(names, size, sets=sets, device=device, seed=seed)
    chosen += real_batches(data, (), data_users, group="target", **shape)
    chosen += skew_sweep(skew_users, tokens=skew_tokens, **shape)
    return some(chosen, "workloads, skew_users, data")


def measured(batches: Sequence[Workload], *, device: str, **options: Any) -> pd.DataFrame:
    """`measure_attention` a batch at a time, see `measured_in_parts`. All providers of a batch are
    measured in one process."""
    if not batches:
        return results.frame([])
    parts = [(f"{batch.op} on {batch.name}", ([batch],)) for batch in batches]
    return measured_in_parts(
        measure_attention, parts, dtype=batches[0].dtype, device=device, **options
    )


def measured_in_parts(
    measure: Callable[..., pd.DataFrame],
    parts: Sequence[tuple[str, tuple[Any, ...]]],
    *,
    dtype: torch.dtype,
    device: str,
    run_id: str,
    cpu_threads: int = 1,
    **options: Any,
) -> pd.DataFrame:
    """`measure(*arguments, ...)` of each part, each kept in `build/cache` as soon as it is done.

    A run that is cut off goes on where it stopped. The ceilings that limits are stated by are one
    measurement for all parts.

    Args:
        measure: see `measure_attention`.
        parts: what is printed of each, and its arguments.
        dtype: of the ceilings.
        device, run_id, cpu_threads, options: of all parts.
    """
    common: dict[str, Any] = {"device": device, "cpu_threads": cpu_threads, "run_id": run_id}
    print(f"the device's ceilings, {dtype}", end=": ")
    tables = [cached(ceiling_table, dtype=dtype, **common)]
    common |= {"ceilings": Ceilings.from_table(tables[0]), "progress": False, **options}
    for number, (name, arguments) in enumerate(parts, 1):
        print(f"{number} of {len(parts)}, {name}", end=": ")
        table = cached(measure, *arguments, **common)
        tables.append(table.loc[table["op"] != "ceiling", :])
    return pd.concat(tables, ignore_index=True)


def describe_batches(batches: Sequence[Workload]) -> pd.DataFrame:
    """A table of what a list of batches holds, a row a batch."""
    columns = {
        "B": "users",
        "queries": "candidates",
        "H": "heads",
        "D": "head_dim",
        "max_len": "longest history",
        "distribution": "lengths",
        "tokens": "tokens",
        "dtype": "dtype",
        "targets": "targets",
        "biased": "biases",
    }
    rows = []
    for batch in batches:
        facts = batch.facts()
        row = {"batch": batch.name, **{title: facts.get(key) for key, title in columns.items()}}
        rows.append({**row, "padding waste": f"{facts['waste']:.0%}"})
    return pd.DataFrame(rows).set_index("batch").dropna(axis="columns", how="all")


def some(batches: list[B], parameters: str) -> list[B]:
    """The batches; ValueError with the `parameters` of a notebook that give any, if there are
    none, for a batch of nothing, and for two of one name, whose rows would be taken for each
    other's: before what was measured earlier is written over."""
    if not batches:
        raise ValueError(f"no batch to measure: nothing in any of {parameters} (see data_users)")
    for batch in batches:
        sizes = ("users", "heads", "head_dim", "max_len")
        positive(**{size: getattr(batch, size, 1) for size in sizes})
    for name, count in Counter(map(_called, batches)).items():
        if count > 1:
            raise ValueError(f"{count} batches are called {name[0]!r}, of {parameters}")
    return batches


def _called(batch: Any) -> tuple[str, ...]:
    """What rows of results tell a batch by."""
    shape = getattr(batch, "batch", batch)
    return batch.name, shape.op, str(shape.dtype)


def positive(**numbers: int | Sequence[int]) -> None:
    """Raises ValueError for the first that is below 1, with its name."""
    for name, given in numbers.items():
        for value in [given] if isinstance(given, int) else given:
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


def precision(device: str) -> dict[str, Any]:
    """bf16 on a GPU, as models are trained there; float32 on a CPU."""
    return {"dtype": torch.bfloat16 if device.startswith("cuda") else torch.float32}


def named_batches(
    names: Sequence[str],
    size: str,
    *,
    sets: Sequence[Any] = (workloads, small_workloads),
    device: str,
    seed: int,
) -> list[Workload]:
    """Named workloads, of the full or the small `sets`.

    Raises:
        ValueError: a name or size that there is not.
    """
    if size not in SIZES:
        raise ValueError(f"size must be one of {', '.join(SIZES)}, not {size!r}")
    known = sets[SIZES.index(size)](**precision(device))
    by_name = {workload.name.removesuffix("-small"): workload for workload in known}
    if unknown := [name for name in names if name not in by_name]:
        raise ValueError(f"no workload {', '.join(unknown)}; there is {', '.join(by_name)}")
    return with_options([by_name[name] for name in names], seed=seed)


def real_batches(
    data: str | None, histories: Sequence[str], users: int, *, seed: int, **shape: Any
) -> list[Workload]:
    """A batch of `users` real histories from each data set, drawn at random.

    Args:
        data: a prepared dataset; None for none.
        histories: names of further ones, see `find_histories`; one that is not at hand is left
            out, and that is said.
        users: in each batch.
        seed: of the draw.
        shape: further options of the workloads.
    """
    found = {describe_data(data)["name"]: data} if data is not None else {}
    for name in histories:
        if (place := find_histories(name)) is not None:
            found[place.stem] = str(place)
        else:
            print(f"no {name} in {paths.DATA}: its histories are not measured")
    batches = []
    for name, place in found.items() if users > 0 else ():
        lengths = np.random.default_rng(seed).permutation(history_lengths(place))[:users]
        batches.append(Workload.from_lengths(name, lengths.tolist(), seed=seed, **shape))
    return batches

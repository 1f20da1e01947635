"""The README's few tables: what became of the paper's claims, attention, rankers.

Everything else is on docs/results.md, which `redraw` writes from the same results.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from jagged_ranking import provenance
from jagged_ranking.figures import style
from jagged_ranking.figures.affordability import HOST, history_overview, judged_by
from jagged_ranking.figures.cached_goals import decode_rows
from jagged_ranking.figures.claims import claims
from jagged_ranking.figures.hstu_goals import hstu_rows
from jagged_ranking.figures.hstu_points import NOT_ASKED
from jagged_ranking.figures.points import (
    Pair,
    against_best,
    attention,
    modes_of,
    of_group,
    ours_failed,
)
from jagged_ranking.figures.published import PUBLISHED
from jagged_ranking.figures.quality import FLOORS, NAMES, differences, shown_metrics, summary
from jagged_ranking.figures.result_folder import Results, read_results, result_folders
from jagged_ranking.figures.scaling_goals import scaling_rows
from jagged_ranking.figures.serving_goals import serving_overview
from jagged_ranking.figures.sparse_goals import length_rows
from jagged_ranking.figures.tables import number, to_markdown
from jagged_ranking.figures.throughput_goals import throughput_overview

BASELINE = "dense_flash"
# Of an interval above 0, on both sides, below.
SIGNS = {1: " ▲", 0: "", -1: " ▼"}
# Logs whose names begin so are no clicks of anyone, and stand behind those that are.
MADE_UP = "synthetic"
# Those that see no item of the test split.
HONEST_FLOORS = tuple(name for name in FLOORS if not name.endswith("_leak"))
NONE = "No results are committed yet."


@dataclass(frozen=True)
class Section:
    """A heading, the notebooks whose results it is made from, what has to be said, the table, and
    the names of pictures."""

    title: str
    notebooks: tuple[str, ...]
    note: str
    table: Callable[[pd.DataFrame], pd.DataFrame]
    pictures: tuple[str, ...] = ()


def paper_claims(results: pd.DataFrame) -> pd.DataFrame:
    """The claims that the paper has a number for."""
    found = claims(results)
    return found.loc[found["paper"] != "", ["claim", "paper", "mode", "this run", "holds"]]


def self_attention(results: pd.DataFrame) -> pd.DataFrame:
    """Named workloads and real histories: ours, and the best peer's and dense flash attention's
    time over ours; forward / forward+backward."""
    table = of_group(attention(results, "latency"), "workloads")
    dense = against_best(table, peer=BASELINE)
    rows = []
    for workload, facts, pairs, ours in _by_workload(table):
        shape = ", ".join(f"{facts[name]:g}" for name in ("B", "H", "D", "max_len"))
        slower = (1 / pair.ratio for pair in dense if pair.workload == workload)
        rows.append(
            {
                "workload": workload,
                "users, heads, head_dim, longest": f"{shape}, {facts['distribution']}",
                "waste": f"{facts['waste']:.0%}",
                "jagged (ours), ms": ours,
                **_best_peer(pairs),
                "dense flash takes": _said(slower, "x", 1),
            }
        )
    return pd.DataFrame(rows)


def target_attention(results: pd.DataFrame) -> pd.DataFrame:
    """The same of few queries over long histories, and ours over the limit of the device."""
    table = of_group(attention(results, "latency"), "target")
    return pd.DataFrame(
        [
            {
                "workload": workload,
                "users x candidates": f"{facts['B']:g} x {facts['queries']:g}",
                "events, longest": f"{facts['tokens']:,}, {facts['max_len']:,}",
                "jagged (ours), ms": ours,
                "over the limit": _said((pair.ours / pair.limit for pair in pairs), "x", 2),
                **_best_peer(pairs),
            }
            for workload, facts, pairs, ours in _by_workload(table)
        ]
    )


def rankers(results: pd.DataFrame) -> pd.DataFrame:
    """A row a model, a column a data set: the mean over seeds of what it is judged by; whether the
    interval of the difference to mean-pooling excludes 0; below, the best floor and what others
    published."""
    found = summary(results)
    if found.empty:
        return pd.DataFrame()
    signs = {
        (row.workload, row.provider, row.metric): SIGNS[int(str(row.side))]
        for row in differences(results).itertuples()
    }
    columns: dict[str, dict[str, str]] = {}
    of_sets = found.groupby("workload", sort=False)
    for dataset, mine in sorted(of_sets, key=lambda named: str(named[0]).startswith(MADE_UP)):
        shown = shown_metrics(mine)
        metric = judged_by(shown) or shown[0]
        means = mine[mine["metric"] == metric].set_index("provider")["mean"]
        cells = {
            style.look_of(model).label: f"{value:.4f}{signs.get((dataset, model, metric), '')}"
            for model, value in means.items()
            if model not in FLOORS
        }
        floors = means[means.index.isin(HONEST_FLOORS)]
        if len(floors):
            best = str(floors.idxmax())
            cells["best floor"] = f"{floors[best]:.4f} ({best})"
        if published := PUBLISHED.get(str(dataset)):
            of_metric = {m: v for (m, name), v in published.scores.items() if name == metric}
            known = [f"{v:.4f} ({style.look_of(m).label})" for m, v in of_metric.items()]
            cells["published"] = ", ".join(known)
        columns[f"{dataset}: {NAMES[metric]}"] = cells
    models = style.ordered(list(dict.fromkeys(found["provider"])))
    labels = [style.look_of(name).label for name in models if name not in FLOORS]
    table = pd.DataFrame(columns, index=pd.Index([*labels, "best floor", "published"])).fillna("")
    table = table[(table != "").any(axis=1)]
    return table.rename_axis("model").reset_index()


def some_columns(
    rows_of: Callable[[pd.DataFrame], list[dict[str, str]]],
    *columns: str,
    of_modes: Sequence[str] = (),
) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """A table of goals, and where we stand, by some of its columns; where `of_modes` says which
    tell the modes apart, the rows of all modes are one."""

    def table(results: pd.DataFrame) -> pd.DataFrame:
        rows = pd.DataFrame(rows_of(results))
        if rows.empty:
            return rows
        if of_modes:
            same = [name for name in columns if name not in of_modes]
            cells = rows.fillna("").replace("", "–").groupby(same, sort=False)[list(of_modes)]
            rows = cells.agg(" / ".join).reset_index()
        return rows.loc[:, list(columns)]

    return table


SECTIONS: Sequence[Section] = (
    Section(
        "The paper's claims",
        ("01_speed", "02_memory"),
        "What a dense model loses grows with the padding waste of its batches, from which follows "
        'whether a claim holds: "yes" is of most batches. Ours includes building its schedule. '
        "53% is judged as 1.53 times the memory of ours; the figure of memory also shows it as "
        "that much less.",
        paper_claims,
        ("01_speed_speedup", "02_memory_memory_ratio"),
    ),
    Section(
        "Attention over jagged histories",
        ("01_speed",),
        "Forward / forward+backward, medians of one run. *It takes*: times of ours; below 1x it is "
        "ahead of us.",
        self_attention,
    ),
    Section(
        "Target attention: few candidates over long histories",
        ("03_target_attention",),
        "The limit reads and writes everything once. Otherwise as above.",
        target_attention,
    ),
    Section(
        "Ranking",
        ("04_quality",),
        "Test split, mean over seeds, the same options for all models of a data set or the same "
        f"trials.{SIGNS[1]} and{SIGNS[-1]}: above and below mean-pooling by an interval over users "
        "and seeds. Floors need no model of the history. *synthetic* is a made-up log.",
        rankers,
    ),
    Section(
        "Longer histories at the same cost",
        ("06_history_length",),
        "The longest history cap that each kind of attention affords at a fixed cost of a training "
        "step, which all shorter ones must keep to as well, and the score at the longest cap "
        "within it that was trained. " + HOST + ".",
        history_overview,
        ("06_history_length_transformer",),
    ),
    Section(
        "HSTU's attention",
        ("07_hstu",),
        "Pointwise weights in place of softmax, against the Triton kernels of HSTU's authors, and "
        f"against our softmax of the same pairs. Forward / forward+backward. {NOT_ASKED}",
        some_columns(
            hstu_rows,
            "workload",
            "with",
            "waste",
            "ours (ms)",
            "softmax (ms)",
            "authors' (ms)",
            "times faster",
            of_modes=("ours (ms)", "softmax (ms)", "authors' (ms)", "times faster"),
        ),
    ),
    Section(
        "Attention to some of the keys",
        ("08_sparse_attention",),
        "S2-Attention, every 16th block and the newest 4, by the length of users. *All / seen*, of "
        "blocks of keys, is how many times faster it would be if a block took it as long as it "
        "takes our dense kernel. Forward / forward+backward.",
        some_columns(
            length_rows,
            "tokens",
            "all / seen",
            "ours (ms)",
            "times faster than ours, all keys",
            "than flash-attn 4",
            "than FA2",
            of_modes=(
                "ours (ms)",
                "times faster than ours, all keys",
                "than flash-attn 4",
                "than FA2",
            ),
        ),
    ),
    Section(
        "Histories in a cache",
        ("09_history_cache",),
        "A step of new queries over what is kept of each user; the limit reads it once.",
        some_columns(
            decode_rows,
            "users",
            "longest history",
            "queries",
            "ours (ms)",
            "ours / limit",
            "best peer",
            "times faster",
        ),
    ),
    Section(
        "Whole training steps",
        ("10_training_throughput",),
        "Samples a second with the making of batches included, against padded flash attention in "
        "the same model, from the least to the most; the paper says 10% more, and 18% less "
        "memory, of production models. *Host's share*: of a step, what the device waits for "
        "launches. Where a step gains less than its goal, and why: "
        "[docs/performance.md](docs/performance.md#goals-that-are-missed-and-why).",
        throughput_overview,
        ("10_training_throughput_parts",),
    ),
    Section(
        "Serving requests",
        ("11_serving",),
        "What a caller waits, histories encoded once a request, against padded flash attention in "
        "the same model; of both, captured in CUDA graphs; and over histories whose keys and "
        "values are kept between requests. *Saves*: how many times faster than ours without a "
        "cache; below 1 it is the slower.",
        some_columns(
            serving_overview,
            "model",
            "requests x candidates",
            "history cap",
            "ours, p50 / p99 (ms)",
            "times faster",
            "memory / padded flash's",
            "by graph, p50 / p99 (ms)",
            "times faster by graph",
            "cached, p50 / p99 (ms)",
            "saves (wall)",
            "saves (device)",
        ),
        ("11_serving_latency",),
    ),
    Section(
        "Training on several GPUs",
        ("12_scaling",),
        "Requests grow with the GPUs; batches are shared out by tokens (or their squares, where "
        "attention rules) or by users.",
        some_columns(scaling_rows, "ranks", "batches", "samples / s", "efficiency", "imbalance"),
    ),
)


def headlines(figures_dir: Path | str) -> str:
    """Markdown of the sections whose results are there; pictures relative to the folder above."""
    figures_dir, parts = Path(figures_dir), list[str]()
    known = {folder.name: read_results(folder) for folder in result_folders(figures_dir)}
    for section in SECTIONS:
        runs = [known[name] for name in section.notebooks if name in known]
        rows = [table for run in runs if len(table := section.table(run.table))]
        if not rows:
            continue
        parts += [f"### {section.title}", section.note, *map(_made_by, runs)]
        parts.append(to_markdown(pd.concat(rows, ignore_index=True).fillna("")))
        for notebook in section.notebooks:
            for name in section.pictures:
                picture = figures_dir / notebook / f"{name}.svg"
                if picture.is_file():
                    title = style.title_of(picture)
                    parts.append(f"![{title}]({figures_dir.name}/{notebook}/{picture.name})")
    return "\n\n".join(parts) or NONE


def _made_by(run: Results) -> str:
    manifest = run.manifest
    own = " · with options of its own" if provenance.changes_of_preset(manifest) else ""
    return f"*{manifest['id']}, preset {manifest['preset']} · {style.footer(manifest)}{own}*"


def _by_workload(table: pd.DataFrame) -> Iterator[tuple[str, pd.Series, list[Pair], str]]:
    """(its name, facts, ours against the best peer in each mode, ours in ms) of each workload;
    where ours ran out of memory or failed, that is said in place of its time."""
    failed = ours_failed(table)
    pairs = {(pair.workload, pair.mode): pair for pair in against_best(table)}
    pairs |= {call: Pair(*call, math.nan, "", math.nan, math.nan) for call in failed}
    modes = modes_of(table)
    for workload, mine in table.groupby("workload", sort=False):
        calls = [call for mode in modes if (call := (str(workload), mode)) in pairs]
        if calls:
            ours = " / ".join(failed.get(call) or number(pairs[call].ours) for call in calls)
            yield calls[0][0], mine.iloc[0], [pairs[call] for call in calls], ours


def _best_peer(pairs: Sequence[Pair]) -> dict[str, str]:
    labels = dict.fromkeys(style.look_of(pair.peer).label for pair in pairs if pair.peer)
    takes = _said((1 / pair.ratio for pair in pairs), "x", 2)
    return {"best peer": " / ".join(labels) or "–", "it takes": takes}


def _said(values: Iterable[float], unit: str = "", digits: int | None = None) -> str:
    """One number a mode, a dash for none."""
    shown = (number(value, digits) + ("" if math.isnan(value) else unit) for value in values)
    return " / ".join(shown) or "–"

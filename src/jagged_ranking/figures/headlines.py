"""The README's few tables: the paper's claims, attention, rankers, and what else the kernels carry.

Everything else is on docs/results.md, which `redraw` writes from the same results.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from jagged_ranking import provenance
from jagged_ranking.figures import style
from jagged_ranking.figures.affordability import HOST, history_overview
from jagged_ranking.figures.cached_goals import (
    PREFIX_NOTE,
    decode_rows,
    prefix_rows,
    scoring_rows,
)
from jagged_ranking.figures.headline_tables import (
    SIGNS,
    compressed,
    paper_claims,
    rankers,
    self_attention,
    some_columns,
    target_attention,
)
from jagged_ranking.figures.hstu_goals import hstu_rows
from jagged_ranking.figures.hstu_points import NOT_ASKED
from jagged_ranking.figures.result_folder import Results, read_results, result_folders
from jagged_ranking.figures.scaling_goals import scaling_rows
from jagged_ranking.figures.serving_goals import serving_overview
from jagged_ranking.figures.sparse_goals import density_rows, length_rows, retrieval_rows
from jagged_ranking.figures.tables import to_markdown
from jagged_ranking.figures.throughput_goals import throughput_overview

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
            by_mode=("ours (ms)", "softmax (ms)", "authors' (ms)", "times faster"),
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
            by_mode=(
                "ours (ms)",
                "times faster than ours, all keys",
                "than flash-attn 4",
                "than FA2",
            ),
        ),
    ),
    Section(
        "Any blocks of keys",
        ("08_sparse_attention",),
        "Time over the share of blocks that are seen, as a line: S2-Attention with other strides, "
        "and blocks at random (block-sparse FlashAttention). *Intercept*: of the time on all keys; "
        "*a quarter*: with a quarter of the blocks, how many times faster than on all. Forward / "
        "forward+backward.",
        some_columns(
            density_rows,
            "keys",
            "densities",
            by_mode=("R²", "intercept", "a quarter: times faster"),
        ),
    ),
    Section(
        "Blocks that are found by retrieval",
        ("08_sparse_attention",),
        "Candidates over long histories, of which they see the blocks whose mean keys fit best, "
        "and the newest. *All told* counts the finding of the blocks. Forward / forward+backward.",
        some_columns(
            retrieval_rows,
            "candidates",
            "blocks",
            by_mode=("lists (ms)", "ours (ms)", "ours, all keys (ms)", "times faster", "all told"),
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
        "A prefix that all users share",
        ("09_history_cache",),
        PREFIX_NOTE + " *Times less*: of memory. Forward / forward+backward.",
        some_columns(
            prefix_rows,
            "users",
            "events",
            "prefix",
            by_mode=("ours (ms)", "copied (ms)", "times faster", "times less"),
        ),
    ),
    Section(
        "Which events of a history to keep",
        ("09_history_cache",),
        "Scissorhands: for each event, in how many of the last queries it had less than its share, "
        "against PyTorch on all scores at once; *scissorhands* then chooses and writes what stays.",
        some_columns(
            scoring_rows,
            "users",
            "events of each",
            "to be kept",
            "ours (ms)",
            "best peer",
            "its ms",
            "times faster",
            "counters off by",
            "scissorhands (ms)",
        ),
    ),
    Section(
        "Ranking on what was kept",
        ("09_history_cache",),
        "1x: the score on whole histories. Below it, what is lost where a fifth of them is kept, "
        "which costs no quality as the paper of Scissorhands (arXiv 2305.17118) has it, with the "
        "95% interval over users and seeds.",
        compressed,
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

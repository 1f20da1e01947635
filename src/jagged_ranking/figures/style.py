"""How every figure looks: sizes, colours, one style a provider, marks, and saving.

Figures are drawn without pyplot and inside `look()`, so that nobody's own settings change, nor
count, and saved without dates or random ids, so that the same results give the same bytes.
"""

import html
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import matplotlib
import seaborn
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from jagged_ranking.figures.labels import place_labels
from jagged_ranking.paths import naming
from jagged_ranking.results import atomic

# ACM's text width, in inches.
TEXT_WIDTH = 7.0
FORMATS = ("svg", "pdf", "png")
PAPER_COLOR = "#6b2737"

_COLORS = [to_hex(color) for color in seaborn.color_palette("colorblind", 10)]


@dataclass(frozen=True)
class Look:
    """Colour, marker and line of one provider or model, the same in every figure."""

    label: str
    color: str
    marker: str | tuple[int, int, int]
    line: Any = "-"


LOOKS: dict[str, Look] = {
    "jagged": Look("jagged (ours)", _COLORS[0], "o", "-"),
    "jagged_rows": Look("ours, one program a row", "#6f5bd0", "X", (0, (5, 1))),
    "jagged_split": Look("ours, split-K", "#7a3b12", "p", (0, (3, 1.5))),
    "jagged_stream": Look("ours, stream-K", "#2f6f4f", "H", (0, (1.5, 1))),
    "jagged_dense": Look("ours, all keys", _COLORS[1], "s", (0, (5, 1.5))),
    "jagged_padded": Look("ours, padded", _COLORS[2], "^", (0, (3, 1))),
    "dkernel": Look("DKernel (S2's own)", _COLORS[3], "v", (0, (3, 1, 1, 1))),
    "jagged_softmax": Look("ours, softmax", "#8172b3", (4, 0, 0), (0, (5, 1))),
    "dense_eager": Look("dense, eager", _COLORS[1], "s", (0, (5, 1.5))),
    "dense_flash": Look("dense flash (SDPA)", _COLORS[2], "^", (0, (3, 1))),
    "dense_cudnn": Look("dense cuDNN (SDPA)", _COLORS[3], "v", (0, (3, 1, 1, 1))),
    "dense_sdpa": Look("dense SDPA, masked", _COLORS[4], "D", (0, (1, 1))),
    "njt_sdpa": Look("nested tensor + SDPA", _COLORS[5], "P", (0, (4, 1, 1, 1, 1, 1))),
    "flex": Look("FlexAttention", "#a05a9c", "h", (0, (6, 2))),
    "varlen_attn": Look("varlen_attn (FA2)", "#4d4d4d", "d", (0, (2, 1))),
    "varlen_attn_split": Look("varlen_attn, split", "#8a8a8a", "*", (0, (2, 1, 0.5, 1))),
    "flashinfer": Look("FlashInfer", "#882255", "8", (0, (5, 1, 1, 1, 1, 1))),
    "fbgemm_sll": Look("FBGEMM sll", "#b59b00", "<", (0, (1, 1.5))),
    "dense_hstu": Look("dense PyTorch", "#c26a00", (5, 0, 180), (0, (5, 1.5))),
    "hstu_triton": Look("HSTU's Triton", "#8c8000", (3, 0, 30), (0, (1, 1.5))),
    "padded": Look("padded PyTorch", _COLORS[1], "s", (0, (5, 1.5))),
    "flat": Look("PyTorch on flat tokens", _COLORS[2], "^", (0, (3, 1))),
    "njt": Look("nested tensor", _COLORS[5], "P", (0, (4, 1, 1, 1, 1, 1))),
    "segment_reduce": Look("segment_reduce", _COLORS[4], "D", (0, (1, 1))),
    "embedding_bag": Look("EmbeddingBag", _COLORS[3], "v", (0, (3, 1, 1, 1))),
    "flash_attn_4": Look("flash-attn 4", _COLORS[9], ">", (0, (4, 1.5, 1, 1.5))),
    "padded_dense": Look("padded dense", _COLORS[1], "s", (0, (5, 1.5))),
    "padded_sdpa": Look("padded, masked (SDPA)", _COLORS[4], "D", (0, (1, 1))),
    "padded_flash": Look("padded flash (SDPA)", _COLORS[2], "^", (0, (3, 1))),
    "nested": Look("nested tensor + SDPA", _COLORS[5], "P", (0, (4, 1, 1, 1, 1, 1))),
    "jagged_cached": Look("ours, histories cached", "#6f5bd0", "X", (0, (5, 1))),
    "varlen_paged": Look("varlen_attn, paged (FA2)", "#4d4d4d", "d", (0, (2, 1))),
    "varlen_gathered": Look("varlen_attn, keys copied", "#8a8a8a", "*", (0, (2, 1, 0.5, 1))),
    "cat": Look("jagged_cat: a copy of all", _COLORS[3], "v", (0, (3, 1, 1, 1))),
    "dense_scores": Look("all scores, PyTorch", _COLORS[1], "s", (0, (5, 1.5))),
    "pivotal": Look("pivotal (Scissorhands)", _COLORS[0], "o", "-"),
    "h2o": Look("heavy hitters (H2O)", _COLORS[2], "^", (0, (3, 1))),
    "newest": Look("newest", _COLORS[1], "s", (0, (5, 1.5))),
    "random": Look("random", _COLORS[7], "D", (0, (1, 1))),
    "strided": Look("S2-Attention", _COLORS[0], "o", "-"),
    "semi_local": Look("semi-local", _COLORS[2], "^", (0, (3, 1))),
    "retrieved": Look("retrieval", _COLORS[4], "D", (0, (1, 1))),
    "all_keys": Look("all keys", _COLORS[1], "s", (0, (5, 1.5))),
    "by_tokens": Look("balanced by tokens", _COLORS[0], "o", "-"),
    "from_disk": Look("trained from disk", _COLORS[0], "o", "-"),
    "by_users": Look("balanced by users", _COLORS[1], "s", (0, (5, 1.5))),
    "mean_pool": Look("mean-pool", _COLORS[7], "s"),
    "pma": Look("PMA", "#8a8a8a", "P"),
    "din": Look("DIN", _COLORS[4], "v"),
    "target_attention": Look("target attention", _COLORS[1], "^"),
    "sim": Look("SIM", "#b59b00", "d"),
    "pyramid": Look("pyramid", _COLORS[5], "p"),
    "transformer": Look("transformer", _COLORS[0], "o"),
    "sasrec": Look("SASRec", "#117733", "h"),
    "hstu": Look("HSTU", _COLORS[2], "D"),
    "bst": Look("BST", _COLORS[3], "<"),
    "transact": Look("TransAct", "#882255", ">"),
    "counts": Look("floor: counts", "#4d4d4d", "x", (0, (4, 2))),
    "popularity": Look("floor: popularity", "#4d4d4d", "+", (0, (1, 1.5))),
    "repeats": Look("floor: repeats", "#4d4d4d", "|", (0, (6, 1.5, 1, 1.5))),
    "popularity_leak": Look("popularity, test items counted", "#4d4d4d", "1", "-"),
}
# That stand beside each other in the narrowest panel.
_MOST_LABELS = 7
MODE_LOOKS: dict[str, Look] = {
    "forward": Look("forward", _COLORS[0], "o", "-"),
    "forward+backward": Look("forward + backward", _COLORS[3], "s", (0, (5, 1.5))),
}

# Of a logarithmic axis, within each power of ten, the densest first.
_TICKS = ((1.0, 1.5, 2.0, 3.0, 5.0, 7.0), (1.0, 2.0, 5.0), (1.0, 3.0), (1.0,))
_LEAST_TICKS = 3  # that a value between them can be read off
COLUMN_LABEL = 6.5  # points, of what stands below an axis
# Matplotlib's settings in `look()`; docs/figures.md changes some before it draws.
RC: dict[str, Any] = {
    # A data set's name may hold a $.
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 7,
    "axes.titlesize": 7.5,
    "axes.titleweight": "bold",
    "axes.labelsize": 7,
    "xtick.labelsize": COLUMN_LABEL,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6.5,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.edgecolor": "#444444",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.dpi": 100,
    "savefig.dpi": 220,
    "svg.fonttype": "path",
    "svg.hashsalt": "jagged",
    "pdf.fonttype": 42,
}
_METADATA: dict[str, dict[str, Any]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}


@contextmanager
def look() -> Iterator[None]:
    """Draw and save inside of this."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(cast(Any, RC))
        yield


def look_of(name: str) -> Look:
    """The style of a provider or model; a plain one for a name that is new."""
    return LOOKS.get(name, Look(name, "#000000", "."))


def ordered(names: Sequence[str]) -> list[str]:
    """Names in the order of LOOKS, then new ones by name: the order of legends and bars."""
    known = [name for name in LOOKS if name in names]
    return known + sorted(set(names) - set(LOOKS))


def new_figure(
    rows: int, columns: int, *, width: float = TEXT_WIDTH, height: float, **options: Any
) -> tuple[Figure, Any]:
    """A figure with [rows, columns] axes and a strip at the bottom for `finish`."""
    figure = Figure(figsize=(width, height), layout="constrained")
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.05, h_pad=0.05, wspace=0.04, hspace=0.06)
    _reserve(figure, 1)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, axes


def _reserve(figure: Figure, lines: int) -> None:
    """Leaves a strip for small lines below all axes."""
    strip = 0.04 + 0.12 * lines
    strip /= figure.get_size_inches()[1]
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0, strip, 1, 1 - strip))


def legend(figure: Figure, handles: Mapping[str, Any], *, columns: int = 4) -> None:
    """One legend above all axes, outside of the data. `handles` maps label -> artist; providers
    come first, in the order of LOOKS."""
    if handles:
        # of a label that two have, the first place
        places = {one.label: place for place, one in reversed([*enumerate(LOOKS.values())])}
        handles = dict(sorted(handles.items(), key=lambda item: places.get(item[0], len(places))))
        rows = math.ceil(len(handles) / columns)
        figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside upper center",
            ncols=math.ceil(len(handles) / rows),
            columnspacing=1.6,
        )


def finish(
    figure: Figure, manifest: Mapping[str, Any], dtypes: Sequence[str] = (), *, note: str = ""
) -> None:
    """Say on the figure which device and versions it was measured with, and mark a smoke run.

    A note about the whole figure stands in a line of its own above that.
    """
    height = figure.get_size_inches()[1]
    low = 0.045 / height
    if note:
        _reserve(figure, 2)
        figure.text(0.5, 0.17 / height, note, fontsize=6, color="#333333", ha="center", va="bottom")
    said = footer(manifest, dtypes)
    figure.text(0.006, low, said, fontsize=5, color="#666666", ha="left", va="bottom")
    if manifest.get("preset") == "smoke":
        red: dict[str, Any] = {"weight": "bold", "color": "#c0392b"}
        middle: dict[str, Any] = {"ha": "center", "va": "center", "rotation": 18}
        figure.text(0.5, 0.45, "smoke run", fontsize=34, alpha=0.13, **middle, **red)
        note = "SMOKE RUN: tiny sizes, not a result"
        figure.text(0.994, low, note, fontsize=5, ha="right", va="bottom", **red)


def footer(manifest: Mapping[str, Any], dtypes: Sequence[str] = ()) -> str:
    """One line: device, dtypes, versions, code."""
    versions = manifest.get("versions") or {}
    said = [manifest.get("device") or "unknown device", *dtypes]
    names = {"torch": "torch", "triton": "Triton", "cuda": "CUDA", "driver": "driver"}
    if manifest.get("device_type") == "cpu":
        names = {"torch": "torch"}
    said += [f"{title} {versions[key]}" for key, title in names.items() if versions.get(key)]
    return " · ".join([*said, code_of(manifest)])


def code_of(manifest: Mapping[str, Any]) -> str:
    """The commit that made the results, and whether what they depend on has changed since."""
    sha = str(manifest.get("git_sha") or "unknown")[:8]
    changes = " with changes" if manifest.get("git_dirty") else ""
    since = ", changed since" if manifest.get("code_changed") else ""
    return f"code {sha}{changes}{since}"


def counted(number: int, name: str) -> str:
    """ "1 user", "1,024 users"."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def of_layers(model: str, layers: int) -> str:
    """ "SASRec, 4 layers"."""
    return f"{look_of(model).label}, {counted(int(layers), 'layer')}"


def log_y_axis(axes: Axes, low: float, high: float) -> None:
    """A logarithmic axis from low to high that says 0.1, 1, 10 rather than powers, with enough
    ticks to read."""
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    _plain_log_ticks(axes.yaxis, low, high)


def log_x_axis(axes: Axes, low: float, high: float) -> None:
    """As `log_y_axis`."""
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    _plain_log_ticks(axes.xaxis, low, high)


def _ticks_between(low: float, high: float, subs: Sequence[float]) -> int:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return sum(low <= sub * 10.0**decade <= high for decade in decades for sub in subs)


def _plain_log_ticks(axis: Any, low: float, high: float) -> None:
    steps = high / max(low, 1e-300)
    place = 0 if steps < 6 else 1 if steps < 100 else 2 if steps < 2000 else 3
    while place and _ticks_between(low, high, _TICKS[place]) < _LEAST_TICKS:
        place -= 1
    subs = _TICKS[place]
    axis.set_major_locator(LogLocator(base=10, subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
    if len(subs) > 1:
        axis.set_minor_locator(NullLocator())


def broken(name: str, width: int = 10) -> str:
    """A name in lines of so many characters where it has `_` and spaces to be broken at."""
    lines = [""]
    for part in re.findall(r"[^_ ]+[_ ]*", name):
        if lines[-1] and len(lines[-1]) + len(part.rstrip("_ ")) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip("_ ") for line in lines)


def binary_axis(axes: Axes, values: Sequence[int], label: str) -> None:
    """A base-2 axis with a tick at each measured value; of many, every second has its number."""
    measured = sorted(set(values))
    labelled = measured[::2] if len(measured) > _MOST_LABELS else measured
    axes.set_xscale("log", base=2)
    axes.set_xticks(measured, [f"{n:g}" if n in labelled else "" for n in measured])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)


def count_axis(axes: Axes, label: str) -> None:
    """A logarithmic axis that says 30k, 100k, 300k, 1M."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 3.0), numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _count(value)))
    axes.set_xlabel(label)


def _count(value: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def waste_axis(axes: Axes) -> None:
    """0 to 100 percent."""
    axes.set_xlim(-4, 100)
    axes.set_xticks([0, 25, 50, 75, 100], ["0%", "25%", "50%", "75%", "100%"])
    axes.set_xlabel("padding waste of the batch")


def save(figure: Figure, out: Path, stem: str, title: str) -> list[Path]:
    """Write SVG, PDF and PNG; a file whose bytes would not change is left alone.

    Args:
        title: what the figure shows, for who cannot see it; see `title_of`.
    """
    written = []
    # Arranged once, not for every format anew.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    # The solver's last bits vary from run to run, and the names of clip paths hash all bits.
    for axes in figure.axes:
        bounds = [round(float(edge), 6) for edge in axes.get_position().bounds]
        axes.set_position((bounds[0], bounds[1], bounds[2], bounds[3]))
    place_labels(figure)
    for kind in FORMATS:
        path = Path(out) / f"{stem}.{kind}"
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, metadata={**_METADATA[kind], "Title": title})
        write_if_changed(path, buffer.getvalue())
        written.append(path)
    return written


def save_all(
    figures: Mapping[str, Figure],
    titles: Mapping[str, str],
    manifest: Mapping[str, Any],
    out: Path | str,
) -> list[Path]:
    """`save` each figure under `<id>_<name>`; returns the files."""
    return [
        path
        for name, figure in figures.items()
        for path in save(figure, Path(out), f"{manifest['id']}_{name}", titles[name])
    ]


def forget(folder: Path, run_id: str) -> None:
    """Delete the figures of earlier results of a run: of fewer data sets there are fewer, and what
    is left would be taken for theirs. A file that is not there in every format is somebody's own.
    """
    for svg in folder.glob(f"{run_id}_*.{FORMATS[0]}"):
        saved = [svg.with_suffix(f".{kind}") for kind in FORMATS]
        if all(path.is_file() for path in saved):
            for path in saved:
                path.unlink()


def title_of(svg: Path) -> str:
    """What a figure that `save` wrote shows; its name where it does not say."""
    found = re.search(r"<title>(.*?)</title>", svg.read_text(encoding="utf-8"), re.DOTALL)
    return html.unescape(found[1]) if found else svg.stem


def write_if_changed(path: Path, content: bytes) -> bool:
    """Whole or not at all; True if the file is new or other than before."""
    if path.is_file() and path.read_bytes() == content:
        return False
    with naming(path), atomic(path) as temporary:
        temporary.write_bytes(content)
    return True

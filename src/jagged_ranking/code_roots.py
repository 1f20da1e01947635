"""What code a result depends on: the one table of it, and its hash.

A result is as new as the code that decides its numbers. What only says where it comes from, draws
it or runs the notebook does not count, so that a change there makes no result stale. Nor does the
reading of a data set where its digest is in the result already.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jagged_ranking import paths

_RANKING = "src/jagged_ranking"
CODE_FOLDERS = tuple(paths.CODE)
DATA = ("data_prep",)
FIGURES = (f"{_RANKING}/figures", f"{_RANKING}/results.py")
_KERNELS = "kernels/jagged_kernels"
# Of speed: what it times, and not the rest of the kernels that stand on it.
TIMED = tuple(
    f"{_KERNELS}/{room}" for room in ("attention", "core", "device", "ops", "schedule", "tensors")
)
_MEASURING = (
    *(
        f"{_RANKING}/measure/{name}.py"
        for name in (
            "benchmark", "ceilings", "contest", "gathering", "length_distributions", "lineup",
            "peak_memory", "pointwise", "reference", "timing", "trial", "workload_sets",
            "workloads",
        )
    ),
    f"{_RANKING}/measure/providers",
    f"{_RANKING}/first_line.py",
    f"{_RANKING}/results.py",
)  # fmt: skip
MEASURE = (*TIMED, *_MEASURING)
# All of the kernels, although a CPU runs the native path alone: which files that is is for them
# to know, and models are trained on GPUs too.
TRAINING = (
    "kernels",
    *DATA,
    *(f"{_RANKING}/{room}" for room in ("data", "layers", "models", "evaluation", "training")),
    f"{_RANKING}/first_line.py",
    f"{_RANKING}/results.py",
)
_ATTENTION = (*MEASURE, f"{_RANKING}/reproduce/attention_study.py")
# Of self-attention, with its hard batches.
_SELF = (
    *_ATTENTION,
    f"{_RANKING}/measure/hard_workloads.py",
    f"{_RANKING}/reproduce/hard_batches.py",
)
_HISTORY = (
    *TRAINING,
    *_MEASURING,
    f"{_RANKING}/reproduce/quality_study.py",
    f"{_RANKING}/reproduce/history_study.py",
    f"{_RANKING}/reproduce/step_cost.py",
    f"{_RANKING}/reproduce/step_contest.py",
    f"{_RANKING}/reproduce/training_step.py",
    f"{_RANKING}/reproduce/graphed_step.py",
)
_CACHED = (
    *TRAINING,
    *_MEASURING,
    f"{_RANKING}/measure/cached",
    f"{_RANKING}/measure/interaction",
    f"{_RANKING}/reproduce/attention_study.py",
    f"{_RANKING}/reproduce/quality_study.py",
    f"{_RANKING}/reproduce/history_study.py",
    f"{_RANKING}/reproduce/cached_study.py",
    f"{_RANKING}/reproduce/compressed_quality.py",
)
_HSTU = (*_ATTENTION, f"{_RANKING}/reproduce/hstu_study.py")
_INTERACTION = (
    *_ATTENTION,
    f"{_RANKING}/measure/interaction",
    f"{_RANKING}/reproduce/interaction_study.py",
)
_SCALING = (
    *TRAINING,
    *(f"{_RANKING}/reproduce/scaling_{name}.py" for name in ("study", "worker", "model")),
)
_SPARSE = (
    *_ATTENTION,
    f"{_RANKING}/measure/sparse",
    f"{_RANKING}/reproduce/sparse_study.py",
)

_THROUGHPUT = (
    *TRAINING,
    *_MEASURING,
    *(
        f"{_RANKING}/reproduce/{name}.py"
        for name in (
            "throughput_study", "request_batches", "step_contest", "step_parts", "training_step",
            "graphed_step", "energy", "streaming_study", "streaming_worker",
        )
    ),
)  # fmt: skip

_SERVING = (
    *TRAINING,
    *_MEASURING,
    *(
        f"{_RANKING}/reproduce/{name}.py"
        for name in (
            "serving_study", "serving_contest", "request_batches", "step_contest", "training_step",
        )
    ),
)  # fmt: skip

# Of each notebook, by its id, and of what is called in it, by the room; files and folders.
ROOTS: Mapping[str, tuple[str, ...]] = {
    "01_speed": _SELF,
    "02_memory": _SELF,
    "03_target_attention": _ATTENTION,
    "04_quality": TRAINING,
    "05_interaction_kernels": _INTERACTION,
    "06_history_length": _HISTORY,
    "09_history_cache": _CACHED,
    "08_sparse_attention": _SPARSE,
    "07_hstu": _HSTU,
    "10_training_throughput": _THROUGHPUT,
    "11_serving": _SERVING,
    "12_scaling": _SCALING,
    # What is timed, and how: each of its rows says in words which call it is of.
    "choice_regret": (*TIMED, f"{_RANKING}/measure/timing.py"),
    "exactness": TIMED,
    "fp8_pays": MEASURE,
    "fp8_quality": TRAINING,
    "jagged_ranking.measure": MEASURE,
    "jagged_ranking.measure.cached": (
        *MEASURE,
        f"{_KERNELS}/cache",
        f"{_RANKING}/measure/cached",
        f"{_RANKING}/measure/interaction",
    ),
    "jagged_ranking.measure.interaction": (*MEASURE, f"{_RANKING}/measure/interaction"),
    "jagged_ranking.measure.sparse": (*MEASURE, f"{_RANKING}/measure/sparse"),
    "jagged_ranking.training": TRAINING,
}


def roots_of(name: str) -> tuple[str, ...]:
    """What a notebook (its id) or a module (its dotted name) depends on: of a module, as its
    innermost room in the table does; all code where the table does not say."""
    parts = name.split(".")
    rooms = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    found = next((ROOTS[room] for room in rooms if room in ROOTS), CODE_FOLDERS)
    return tuple(dict.fromkeys(found))


def code_hash(root: Path | None = None, roots: Sequence[str] = CODE_FOLDERS) -> str:
    """sha256 over the path and content of every Python file that is one of `roots` or in one.

    Notebooks and tests do not count: they use the code, they do not decide its results.
    """
    root = root or paths.ROOT
    digest = hashlib.sha256()
    for name in roots:
        for relative, path in paths.code_files(root, name):
            content = path.read_bytes()
            digest.update(f"{relative}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


def code_digests(root: Path | None = None, roots: Sequence[str] = CODE_FOLDERS) -> dict[str, str]:
    """sha256 of each Python file that is one of `roots` or in one, by its path in a checkout."""
    root = root or paths.ROOT
    files = [found for name in roots for found in paths.code_files(root, name)]
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files}


def has_changed(manifest: Mapping[str, Any], root: Path | None = None) -> bool:
    """Whether the code that a result depends on is another now than when it was made.

    By hashes, so that no git is needed. The manifest says what its hash is of; an old one, of all
    code, counts as changed as soon as anything did, and one without a hash always.
    """
    roots = manifest.get("code_roots") or CODE_FOLDERS
    return manifest.get("code_hash") != code_hash(root, roots)

"""What notebooks use: where they write, what is kept because it is expensive, how to show it."""

from jagged_ranking.reproduce.attention_study import (
    describe_batches,
    measured,
    study_batches,
    target_batches,
)
from jagged_ranking.reproduce.cached_study import (
    cache_cases,
    describe_cases,
    measured_cached,
    quality_by_compression,
)
from jagged_ranking.reproduce.hard_batches import hard_batches
from jagged_ranking.reproduce.history_study import (
    costs_by_cap,
    history_folders,
    joined,
    quality_by_cap,
)
from jagged_ranking.reproduce.hstu_study import hstu_batches
from jagged_ranking.reproduce.interaction_study import interaction_batches, measured_interaction
from jagged_ranking.reproduce.quality_study import compared
from jagged_ranking.reproduce.scaling_study import scaling, scaling_data
from jagged_ranking.reproduce.serving_study import (
    describe_points,
    measured_serving,
    serving_points,
)
from jagged_ranking.reproduce.session import Session, begin, show, show_tables
from jagged_ranking.reproduce.sparse_study import (
    describe_sparse,
    measured_sparse,
    patterns_of,
    sparse_batches,
)
from jagged_ranking.reproduce.streaming_study import measured_streaming
from jagged_ranking.reproduce.synthetic_log import synthetic_log
from jagged_ranking.reproduce.throughput_study import (
    describe_lengths,
    measured_throughput,
    throughput_batches,
)

__all__ = [
    "Session",
    "begin",
    "cache_cases",
    "compared",
    "costs_by_cap",
    "describe_batches",
    "describe_cases",
    "describe_lengths",
    "describe_points",
    "describe_sparse",
    "hard_batches",
    "history_folders",
    "hstu_batches",
    "interaction_batches",
    "joined",
    "measured",
    "measured_cached",
    "measured_interaction",
    "measured_serving",
    "measured_sparse",
    "measured_streaming",
    "measured_throughput",
    "patterns_of",
    "quality_by_cap",
    "quality_by_compression",
    "scaling",
    "scaling_data",
    "serving_points",
    "show",
    "show_tables",
    "sparse_batches",
    "study_batches",
    "synthetic_log",
    "target_batches",
    "throughput_batches",
]

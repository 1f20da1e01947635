"""What notebooks use: where they write, what is kept because it is expensive, how to show it."""

from jagged_ranking.reproduce.attention_study import (
    describe_batches,
    measured,
    study_batches,
    target_batches,
)
from jagged_ranking.reproduce.history_study import (
    costs_by_cap,
    history_folders,
    joined,
    quality_by_cap,
)
from jagged_ranking.reproduce.interaction_study import interaction_batches, measured_interaction
from jagged_ranking.reproduce.quality_study import compared
from jagged_ranking.reproduce.session import Session, begin, show, show_tables
from jagged_ranking.reproduce.synthetic_log import synthetic_log

__all__ = [
    "Session",
    "begin",
    "compared",
    "costs_by_cap",
    "describe_batches",
    "history_folders",
    "interaction_batches",
    "joined",
    "measured",
    "measured_interaction",
    "quality_by_cap",
    "show",
    "show_tables",
    "study_batches",
    "synthetic_log",
    "target_batches",
]

"""Jagged attention: specification, backends and schedule.

`api.py` is the function; `reference.py` the specification; `native.py` and `triton_*.py` the
backends; `bias.py` the biases; `ops*.py` their registration with PyTorch; `schedule.py` and
`tiles.py` who does what.
"""

from jagged_kernels.attention.api import jagged_attention
from jagged_kernels.attention.bias import ALiBi, RelativePositionBias, RelativeTimeBias
from jagged_kernels.attention.schedule import AttentionSchedule, attention_schedule

__all__ = [
    "ALiBi",
    "AttentionSchedule",
    "RelativePositionBias",
    "RelativeTimeBias",
    "attention_schedule",
    "jagged_attention",
]

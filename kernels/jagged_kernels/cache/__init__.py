"""Keys and values that are kept from call to call: histories that grow and are asked again.

`history` is the cache, `slots` where its events lie and how they come in and out, `attention` what
asks it; `statistics`, `policies` and `persistence` are which events are worth keeping.
"""

from jagged_kernels.cache.attention import cached_attention
from jagged_kernels.cache.history import HistoryCache
from jagged_kernels.cache.persistence import Persistence, persistence_ratio
from jagged_kernels.cache.policies import scissorhands
from jagged_kernels.cache.schedule import CacheSchedule, cache_schedule
from jagged_kernels.cache.statistics import KeyStatistics, key_statistics

__all__ = [
    "CacheSchedule",
    "HistoryCache",
    "KeyStatistics",
    "Persistence",
    "cache_schedule",
    "cached_attention",
    "key_statistics",
    "persistence_ratio",
    "scissorhands",
]

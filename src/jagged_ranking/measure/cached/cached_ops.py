"""The operations on cached and shared keys that are measured, by name.

What they are called; figures ask it too, which do without torch. What they compute is in `PROBLEMS`
of `cached_measurement.py`.
"""

NOTEBOOK = "09_history_cache"
DECODE, APPEND, PREFIX, SCORING = (
    "cached_attention",
    "cache_append",
    "prefixed_attention",
    "key_statistics",
)
# What is made once a step, and shared by all layers.
SCHEDULE = "cache_schedule"
# What follows from the statistics of keys: the choice of events, and lists of them.
KEEP = "scissorhands"

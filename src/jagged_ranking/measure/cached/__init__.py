"""Measuring what a cache of histories saves: queries of it, its growth, a prefix that users share,
and which events are worth keeping.

from jagged_ranking.measure.cached.cached_measurement import measure_cached
"""

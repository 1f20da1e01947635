"""Running the notebooks: parameters, execution, freshness, caching and the report.

What a notebook itself uses of it: `begin`, `cached` and `show`.
"""

from jagged_ranking.runs.cache import cached
from jagged_ranking.runs.session import Session, begin, show

__all__ = ["Session", "begin", "cached", "show"]

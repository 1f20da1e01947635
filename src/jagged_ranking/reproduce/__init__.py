"""Running the notebooks: parameters, execution, freshness, caching and the report.

`jagged_ranking.reproduce.lab` has what a notebook itself uses of it.
"""

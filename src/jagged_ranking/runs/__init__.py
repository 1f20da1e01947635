"""Running the notebooks: parameters, execution, freshness, caching and the report.

`jagged_ranking.runs.lab` has what a notebook itself uses of it.
"""

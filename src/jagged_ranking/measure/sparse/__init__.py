"""Measuring attention to some of the keys: by a rule, by lists of blocks, by retrieval.

from jagged_ranking.measure.sparse.sparse_measurement import measure_sparse
from jagged_ranking.measure.sparse.sparse_workloads import strided_by_length
table = measure_sparse(strided_by_length(), device="cuda", run_id="08_sparse_attention")
"""

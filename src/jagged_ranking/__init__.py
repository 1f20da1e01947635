"""Rankers over click histories, measuring the kernels they are built on, and the `jagged` command.

    data         click logs as jagged batches
    layers       what all models share
    models       how they differ: histories pooled for a target
    evaluation   predictions, metrics, the floor of running counts
    training     one model trained, several compared
    measure      time, memory and errors of attention and of the interaction operations
    figures      drawn, with tables and goals, from results alone
    reproduce    running the notebooks: parameters, freshness, cache, report

A room imports from those above it, and from the modules beside them (results, provenance, paths,
devices); `tests/test_architecture.py` holds that there are no circles.
"""

"""A step captured once for batches of many sizes: sizes that are few, batches brought to them, and
the graphs of a step over these."""

from jagged_kernels.graphs.step_graphs import StepGraphs as StepGraphs

"""The interaction operations that are measured, by name, in the order of tables and figures."""

from jagged_ranking.measure.interaction import elementwise, products, shapes
from jagged_ranking.measure.interaction.problem import Operation

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for module in (products, elementwise, shapes)
    for operation in module.OPERATIONS
}

"""The interaction operations that are measured, by name, in the order of tables and figures.

What they are called and are for; figures ask it too, which do without torch. What they compute is
in `PROBLEMS` of `measurement.py`.
"""

from dataclasses import dataclass

GROUPS = 16  # of users, who share a weight
LAST = 50  # events
NARROW = 4  # columns
RECENT = 100  # events
BEST = 10  # scores
SQUARE = 256  # longest side of padded scores


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation of the family.

    Args:
        name: in results and tables; a variant of a function has a name of its own.
        function: the public function of `jagged_kernels`.
        purpose: what it is for, in a line.
        backward: it has gradients.
        traced: it works under `torch.compile(fullgraph=True)` as it is called here.
    """

    name: str
    function: str
    purpose: str
    backward: bool = True
    traced: bool = True


OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation(
            name="jagged_dense_bmm",
            function="jagged_dense_bmm",
            purpose="a matrix of its own for each user's tokens",
        ),
        Operation(
            name="jagged_jagged_bmm",
            function="jagged_jagged_bmm",
            purpose="sums of products over a user's tokens: Linformer, second-order features",
        ),
        Operation(
            name="jagged_linear",
            function="jagged_linear",
            purpose="a layer of the jagged MLP, a weight for each user, bias and GELU fused",
        ),
        Operation(
            name="jagged_linear_groups",
            function="jagged_linear",
            purpose=f"the same with {GROUPS} groups of users, SiLU",
        ),
        Operation(
            name="target_interaction",
            function="target_interaction",
            purpose="DIN's unit: [k, q, k - q, k * q] and its first layer, nothing concatenated",
        ),
        Operation(
            name="jagged_outer",
            function="jagged_outer",
            purpose="scores between all pairs of a user's tokens",
        ),
        Operation(
            name="jagged2_matmul",
            function="jagged2_matmul",
            purpose="sums of tokens that such scores weigh",
        ),
        Operation(
            name="jagged_sum",
            function="jagged_sum",
            purpose="sum pooling of a history",
        ),
        Operation(
            name="jagged_mean",
            function="jagged_mean",
            purpose="mean pooling, 0 for a user without events",
        ),
        Operation(
            name="jagged_max",
            function="jagged_max",
            purpose="max pooling, the gradient to the first of the largest",
        ),
        Operation(
            name="jagged_last_k",
            function="jagged_last_k",
            purpose=f"the last k events as a dense tensor (here {LAST})",
        ),
        Operation(
            name="jagged_weighted_sum",
            function="jagged_weighted_sum",
            purpose="a history pooled by given weights",
        ),
        Operation(
            name="jagged_softmax",
            function="jagged_softmax",
            purpose="weights over a user's events, a column at a time, any length",
        ),
        Operation(
            name="jagged_softmax_narrow",
            function="jagged_softmax",
            purpose=f"the same for {NARROW} columns, as many as heads",
        ),
        Operation(
            name="jagged_add",
            function="jagged_add",
            purpose="add a dense [B, L, D] (or per-user, or jagged) operand",
        ),
        Operation(
            name="jagged_mul",
            function="jagged_mul",
            purpose="scale by a per-user [B, D] (or dense, or jagged) operand: gates",
        ),
        Operation(
            name="jagged2_softmax",
            function="jagged2_softmax",
            purpose="softmax of scores by row (or by column)",
        ),
        Operation(
            name="jagged2_mul",
            function="jagged2_mul",
            purpose="scores times other scores or a dense mask",
        ),
        Operation(
            name="jagged_self_difference",
            function="jagged_self_difference",
            purpose="time gaps between all pairs of a user's events",
        ),
        Operation(
            name="jagged_layer_norm",
            function="jagged_layer_norm",
            purpose="layer normalisation of tokens",
        ),
        Operation(
            name="jagged_rms_norm",
            function="jagged_rms_norm",
            purpose="RMS normalisation of x + residual, in one pass",
        ),
        Operation(
            name="jagged_cat",
            function="jagged_cat",
            purpose="several features of a user, or a prefix and its history, one behind the other",
        ),
        Operation(
            name="jagged_slice",
            function="jagged_slice",
            purpose="a part of each history, with a start and length for each user",
        ),
        Operation(
            name="jagged_recent",
            function="jagged_recent",
            purpose=f"the most recent events of each history (here {RECENT})",
        ),
        Operation(
            name="jagged_index_select",
            function="jagged_index_select",
            purpose="a batch of some users, with repeats: histories shared by impressions",
        ),
        Operation(
            name="jagged_top_k",
            function="jagged_top_k",
            purpose=f"the highest scores of each user (here {BEST}): retrieval from a history",
        ),
        Operation(
            name="to_padded",
            function="to_padded",
            purpose="to a dense tensor, truncated at either end",
        ),
        Operation(
            name="from_padded",
            function="from_padded",
            purpose="from a dense tensor",
        ),
        Operation(
            name="jagged2_to_padded",
            function="jagged2_to_padded",
            purpose=f"scores as a dense tensor (here of {SQUARE} x {SQUARE})",
        ),
        Operation(
            name="jagged_unique",
            function="jagged_unique",
            purpose="the distinct ids of each user, with counts",
            backward=False,
            traced=False,
        ),
        Operation(
            name="jagged_embedding",
            function="jagged_embedding",
            purpose="item, category, time and position embeddings added up in one pass",
        ),
    )
}

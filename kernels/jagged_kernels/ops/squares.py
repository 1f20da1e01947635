"""Where the scores of a `Jagged2Tensor` lie, for native implementations and references."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Places(NamedTuple):
    """Of each score [sum of n ** 2], int64."""

    user: Tensor
    row: Tensor
    column: Tensor
    transposed: Tensor  # where the score [column, row] of the same user lies


def score_places(offsets: Tensor, matrix_offsets: Tensor, total: int) -> Places:
    """Places of `total` scores."""
    score = torch.arange(total, device=offsets.device)
    user = torch.searchsorted(matrix_offsets, score, right=True) - 1
    count, begin = offsets.diff().long()[user], matrix_offsets[user]
    row, column = (score - begin) // count, (score - begin) % count
    return Places(user, row, column, begin + column * count + row)


def row_offsets(offsets: Tensor, matrix_offsets: Tensor, tokens: int, total: int) -> Tensor:
    """[tokens + 1]: where each token's row of scores begins, and `total`.

    `tokens` may be more than there are: those behind have empty rows at the end.
    """
    users = offsets.shape[0] - 1
    if users == 0:
        return matrix_offsets.new_full((tokens + 1,), total)
    token = torch.arange(tokens, device=offsets.device)
    user = (torch.searchsorted(offsets.long(), token, right=True) - 1).clamp(max=users - 1)
    place = token - offsets[user]
    begin = matrix_offsets[user] + place * offsets.diff()[user]
    begin = torch.where(token < offsets[-1], begin, total)
    return torch.nn.functional.pad(begin, (0, 1), value=total)


def user_matrices(values: Tensor, offsets: Tensor, matrix_offsets: Tensor) -> list[Tensor]:
    """The [n, n] of each user, as views. Waits for the device: for references."""
    begins = matrix_offsets[:-1].tolist()
    counts = offsets.diff().tolist()
    return [
        values[begin : begin + n * n].view(n, n) for begin, n in zip(begins, counts, strict=True)
    ]

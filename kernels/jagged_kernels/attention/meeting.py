"""How queries meet keys where it is not today's way: by lists of key blocks, or by weights that are
a function of each score alone. What kernels take for both.

`RANGES` is today's: rows see ranges, and a score becomes its share of a softmax. A kernel that is
compiled for it has nothing of what follows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from jagged_kernels.attention.scores.policy import Scores, functions_of
from jagged_kernels.schedule.keys.lists import KeyLists
from jagged_kernels.schedule.keys.token_rule import TokenRule
from jagged_kernels.schedule.row_layout import NO_LIMIT

_NO_RULE = TokenRule(NO_LIMIT, 0, None, None)


class MeetTerms(NamedTuple):
    """The same of one call, as operators take it: plain tensors and numbers.

    Fields:
        row_ptr, col, row_ptr_t, col_t, groups: of `schedule.keys.lists.KeyLists`; None and 0 where
            rows see ranges. The transpose may be None where no backward follows.
        targets, contexts: [B] int32, of a rule for the tokens of partial blocks; None without.
        first: tokens at a user's start that all later ones see, by such a rule.
        ruled: whether there is such a rule (of a causal band with these exceptions).
        scores: the key of a policy of `scores.policy`, "" for softmax.
        divide_by: its n, 0 for the number of the user's keys.
    """

    row_ptr: Tensor | None = None
    col: Tensor | None = None
    row_ptr_t: Tensor | None = None
    col_t: Tensor | None = None
    targets: Tensor | None = None
    contexts: Tensor | None = None
    groups: int = 0
    first: int = 0
    ruled: bool = False
    scores: str = ""
    divide_by: float = 0.0

    @classmethod
    def of(cls, lists: KeyLists | None, scores: Scores | None) -> MeetTerms:
        terms = cls()
        if lists is not None:
            rule = lists.rule or _NO_RULE
            terms = cls(
                lists.row_ptr, lists.col, lists.row_ptr_t, lists.col_t, rule.targets, rule.contexts,
                lists.groups, rule.first, lists.rule is not None,
            )  # fmt: skip
        if scores is not None:
            terms = terms._replace(scores=scores.key, divide_by=scores.divide_by or 0.0)
        return terms

    def lists(self, block: int, left: int) -> KeyLists | None:
        """The lists again; `left`: of their rule."""
        if self.row_ptr is None or self.col is None:
            return None
        rule = TokenRule(left, self.first, self.targets, self.contexts) if self.ruled else None
        transpose = (self.row_ptr_t, self.col_t)
        return KeyLists(self.row_ptr, self.col, *transpose, block, self.groups, rule)


# The fields as arguments of an operator.
MEET_SCHEMA = (
    "Tensor? row_ptr, Tensor? col, Tensor? row_ptr_t, Tensor? col_t, Tensor? targets, "
    "Tensor? contexts, int groups, int first, bool ruled, str policy, float divide_by"
)


class MeetShape(NamedTuple):
    """What a kernel is compiled for.

    Fields:
        groups: of heads that have lists of their own, 0 where rows see ranges.
        first, ruled: of `MeetTerms`.
        weight, d_score: the Triton functions of a policy, None for softmax.
    """

    groups: int = 0
    first: int = 0
    ruled: bool = False
    weight: Any = None
    d_score: Any = None

    def block_of(self, tile: int, block: int) -> int:
        """Tokens that a walk takes at a time: a listed block has as many as a row's tile, more than
        shared memory may hold at once."""
        return min(tile, block) if self.groups else block


class MeetArguments(NamedTuple):
    """What a kernel is launched with.

    Fields:
        row_ptr, col: the lists of the side that the kernel's rows are of.
        targets, contexts: of `MeetTerms`.
        k_offsets: [B + 1], where weights are divided by the number of a user's keys.
        factor: 1 / n, where they are not.
    """

    row_ptr: Tensor | None
    col: Tensor | None
    targets: Tensor | None
    contexts: Tensor | None
    k_offsets: Tensor | None
    factor: float


class Meeting(NamedTuple):
    """Fields:
    constants: what kernels are compiled for.
    arguments, arguments_t: what they are launched with, over rows of queries and of keys.
    """

    constants: MeetShape
    arguments: MeetArguments | None
    arguments_t: MeetArguments | None


RANGES = Meeting(MeetShape(), None, None)


def meeting_of(terms: MeetTerms, k_offsets: Tensor) -> Meeting:
    """What kernels take for `terms`.

    Raises:
        NotImplementedError: a policy without Triton functions.
    """
    if not (terms.groups or terms.scores):
        return RANGES
    weight = d_score = None
    if terms.scores:
        weight, d_score = functions_of(terms.scores)
    by_keys = bool(terms.scores) and terms.divide_by == 0.0
    rest = (
        terms.targets,
        terms.contexts,
        k_offsets if by_keys else None,
        1.0 / terms.divide_by if terms.divide_by else 1.0,
    )
    return Meeting(
        MeetShape(terms.groups, terms.first, terms.ruled, weight, d_score),
        MeetArguments(terms.row_ptr, terms.col, *rest),
        MeetArguments(terms.row_ptr_t, terms.col_t, *rest),
    )

"""Two stages for long histories: search, then exact attention (SIM, Pi et al., CIKM 2020, arXiv
2006.05639, section 3; TWIN, Chang et al., KDD 2023, arXiv 2302.02352, section 4).

The first stage scores every event for the candidate by one dot product and keeps the `top_k` best;
the second is softmax attention over those, and over the most recent events beside them. As in
TWIN, and unlike SIM, which learns its search by a loss of its own, both stages have the same
projections: what is found is what the second stage would weigh most, and learns with it. An event
is projected once, whatever the number of candidates; the search has no gradient and keeps nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad

from jagged_kernels import (
    JaggedTensor,
    jagged_dense_bmm,
    jagged_index_select,
    jagged_recent,
    jagged_top_k,
)
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.layers.attention import Attention
from jagged_ranking.layers.target_pooling import SINK
from jagged_ranking.models.model_config import ModelConfig

RECENT = 8  # latest events that are attended to whatever the search finds


class SIM(nn.Module):
    """Attention to the `top_k` events that a search finds, and to the `RECENT` latest."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.top_k = config.heads, config.top_k
        self.attention = Attention(config.attention)
        self.query = nn.Linear(config.dim, config.dim)
        self.key_value = nn.Linear(config.dim, 2 * config.dim)
        self.sink = nn.Parameter(torch.full((config.heads,), SINK))
        self.out = nn.Linear(2 * config.dim, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        # the same rotation for queries and keys: the search starts as likeness to the candidate
        nn.init.orthogonal_(self.query.weight)
        nn.init.zeros_(self.query.bias)
        with torch.no_grad():
            self.key_value.weight[: config.dim] = self.query.weight

    def forward(
        self, history: JaggedTensor, candidates: JaggedTensor, batch: JaggedBatch
    ) -> Tensor:
        """history [T, D], candidates [C, D] -> [C, D]."""
        query = self.query(candidates.values)
        events = history.with_values(self.key_value(history.values))
        each = torch.arange(len(query) + 1, device=query.device)
        one_by_one = JaggedTensor(query, each, validate=False)
        most, longest = batch.longest
        rows = self._search(events, query, batch)
        kept = rows.with_values(embedding(rows.values, events.values))
        found = self._attend(one_by_one, kept, (1, min(longest, self.top_k)))
        latest = jagged_recent(events, RECENT, total=batch.latest(RECENT))
        asked = candidates.with_values(query)
        recent = self._attend(asked, latest, (most, min(longest, RECENT)))
        return self.dropout(self.out(torch.cat([found, recent], dim=1)))

    @torch.no_grad()
    def _search(self, events: JaggedTensor, query: Tensor, batch: JaggedBatch) -> JaggedTensor:
        """Rows of `events` that each candidate keeps, int64 [kept]; a candidate is a user."""
        key = events.with_values(events.values.chunk(2, dim=1)[0].contiguous())
        seen = jagged_index_select(key, batch.request, total=batch.pairs)
        score = jagged_dense_bmm(seen, query[:, :, None].to(key.values.dtype))
        _, place = jagged_top_k(score.with_values(score.values[:, 0]), self.top_k)
        kept = seen.lengths.clamp(max=self.top_k)
        offsets = pad(kept.cumsum(0), (1, 0))
        total = batch.latest(self.top_k, each_candidate=True)
        candidate = torch.repeat_interleave(kept, output_size=total)
        rank = torch.arange(total, device=query.device) - offsets[candidate]
        row = events.offsets[batch.request[candidate]] + place[candidate, rank]
        return JaggedTensor(row, offsets, validate=False)

    def _attend(
        self, query: JaggedTensor, events: JaggedTensor, longest: tuple[int, int]
    ) -> Tensor:
        """[C, D]; events [N, 2 D] are keys and values."""
        key, value = events.values.unflatten(1, (2, self.heads, -1)).unbind(1)
        heads = query.values.unflatten(1, (self.heads, -1))
        parts = query.with_values(heads), events.with_values(key), events.with_values(value)
        attended = self.attention(*parts, sink=self.sink, longest=longest)
        return attended.values.flatten(1)


ENCODER = SIM

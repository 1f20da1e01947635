"""A pyramid over the history: ever more recent slices of it, each summed up by as many learned
queries, so that what is recent is seen in more detail; the candidate asks the summaries.

The arrangement is ours. Its parts are PMA (Set Transformer, arXiv 1810.00825, section 3.2) and
target attention. All slices of all requests are one jagged batch, so that a stage more is no
launch more; a request has a fixed number of summaries, so that a candidate costs the same however
long the history.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jagged_kernels import JaggedTensor, jagged_recent
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.layers.learned_pooling import LearnedPooling
from jagged_ranking.layers.target_pooling import TargetPooling
from jagged_ranking.models.model_config import ModelConfig

RECENT = (16, 4)  # events of the stages above the whole history
QUERIES = 4  # summaries of each stage


class Pyramid(nn.Module):
    """Stages of learned queries, then target attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.stages = LearnedPooling(
            config.dim, heads=config.heads, queries=QUERIES, kinds=1 + len(RECENT)
        )
        self.pool = TargetPooling(config)

    def forward(
        self, history: JaggedTensor, candidates: JaggedTensor, batch: JaggedBatch
    ) -> Tensor:
        """history [T, D], candidates [C, D] -> [C, D]."""
        slices = [history]
        for length in RECENT:
            slices.append(jagged_recent(history, length, total=batch.latest(length)))
        requests = torch.arange(len(batch) + 1, device=batch.request.device)
        stage = torch.arange(len(slices), device=history.device).repeat_interleave(len(batch))
        summaries = self.stages(_one_batch(slices), stage).unflatten(0, (len(slices), -1))
        # [R, stages * queries, D]: the summaries of a request side by side, as its history
        summaries = summaries.transpose(0, 1).flatten(1, 2)
        offsets = requests * summaries.shape[1]
        found = JaggedTensor(summaries.flatten(0, 1), offsets, validate=False)
        return self.pool(found, candidates, longest=(batch.longest[0], summaries.shape[1]))


def _one_batch(parts: list[JaggedTensor]) -> JaggedTensor:
    """The users of all parts, one part after another."""
    offsets, tokens = [parts[0].offsets], parts[0].values.shape[0]
    for part in parts[1:]:
        offsets.append(part.offsets[1:] + tokens)
        tokens += part.values.shape[0]
    values = torch.cat([part.values for part in parts])
    return JaggedTensor(values, torch.cat(offsets), validate=False)


ENCODER = Pyramid

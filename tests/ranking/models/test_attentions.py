"""Attention by PyTorch's own operations: the same weights, the same logits and gradients."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from small_rankers import batch_of, mixed_rows, ranker
from torch import Tensor

from click_data import ClickDataset
from jagged_kernels import JaggedTensor
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.layers.attention import POINTWISE, attend
from jagged_ranking.models.model_config import ATTENTIONS, ModelConfig
from jagged_ranking.models.ranker import Ranker

ATTENDING = ("target_attention", "transformer", "hstu", "pyramid", "sim", "bst", "transact")
PEERS = ATTENTIONS[1:]
Q_OFFSETS = torch.tensor([0, 2, 2, 3, 7])
K_OFFSETS = torch.tensor([0, 3, 4, 4, 9])
# The causal attention of nested tensors needs a GPU.
ON_A_CPU = [
    (kind, causal) for kind in PEERS for causal in (0, 1) if (kind, causal) != ("nested", 1)
]


def results(kind: str, given: Mapping[str, Tensor], offsets: tuple[Tensor, Tensor], **options):
    """Output and gradients, with a sink where one is given."""
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    q = JaggedTensor(leaves["q"], offsets[0])
    k = JaggedTensor(leaves["k"], offsets[1])
    found = attend(
        q, k, k.with_values(leaves["v"]), kind=kind, sink=leaves.get("sink"), **options
    ).values
    weight = torch.linspace(-1, 1, found.numel()).view_as(found)
    return [found, *torch.autograd.grad((found * weight).sum(), list(leaves.values()))]


@pytest.mark.parametrize("longest", [None, (4, 5)])
@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("kind", PEERS)
def test_cross_attention_of_a_peer_is_ours(
    kind: str, has_sink: bool, longest: tuple[int, int] | None
) -> None:
    """Users without queries, without keys, and with both."""
    torch.manual_seed(0)
    given = {"q": torch.randn(7, 2, 8), "k": torch.randn(9, 2, 8), "v": torch.randn(9, 2, 8)}
    if has_sink:
        given["sink"] = torch.randn(2)
    offsets = Q_OFFSETS, K_OFFSETS
    found = results(kind, given, offsets, longest=longest)
    assert (found[0][2] == 0).all()  # a query without keys
    for ours, theirs in zip(results("jagged", given, offsets), found, strict=True):
        torch.testing.assert_close(theirs, ours, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("kind", "causal"), ON_A_CPU)
def test_self_attention_of_a_peer_is_ours(kind: str, causal: int) -> None:
    torch.manual_seed(0)
    given = {name: torch.randn(9, 2, 8) for name in "qkv"}
    offsets = K_OFFSETS, K_OFFSETS
    options = {"causal": bool(causal)}
    found = results(kind, given, offsets, longest=(5, 5), **options)
    for ours, theirs in zip(results("jagged", given, offsets, **options), found, strict=True):
        torch.testing.assert_close(theirs, ours, atol=1e-6, rtol=1e-5)


def logits_and_gradients(made: Ranker, batch: JaggedBatch) -> list[Tensor]:
    """Of a loss that pulls every logit down: the gradient of the head's bias, a single number,
    is then no difference of large ones, of which bfloat16 would leave little."""
    made.zero_grad()
    logits = made(batch)
    torch.nn.functional.softplus(logits).sum().backward()
    return [logits.detach(), *(p.grad for p in made.parameters() if p.grad is not None)]


@pytest.mark.parametrize("kind", PEERS)
@pytest.mark.parametrize("model", ATTENDING)
def test_a_model_is_the_same_by_any(toy: ClickDataset, model: str, kind: str) -> None:
    if model == "hstu" and kind not in POINTWISE:
        with pytest.raises(ValueError, match=f"attention {kind} is a softmax, .* none"):
            ranker(toy, model, attention=kind)
        return
    ours, theirs = (ranker(toy, model, layers=2, attention=name) for name in ("jagged", kind))
    batch = batch_of(toy, mixed_rows(toy))
    if (model, kind) == ("transformer", "nested"):
        with pytest.raises(ValueError, match="nested is causal on a GPU alone"):
            theirs(batch)
        return
    expected = logits_and_gradients(ours, batch)
    for found, exact in zip(logits_and_gradients(theirs, batch), expected, strict=True):
        torch.testing.assert_close(found, exact, atol=1e-5 * float(exact.abs().max()), rtol=1e-4)


def test_a_batch_without_any_history(toy: ClickDataset) -> None:
    empty = mixed_rows(toy)[:1]
    for kind in PEERS:
        for model in ATTENDING:
            refused = model == "hstu" and kind not in POINTWISE
            if (model, kind) != ("transformer", "nested") and not refused:
                ours, theirs = (ranker(toy, model, attention=name) for name in ("jagged", kind))
                batch = batch_of(toy, empty)
                torch.testing.assert_close(theirs(batch), ours(batch))


def test_another_attention_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attention must be one of jagged, padded_.* 'fa3'"):
        ModelConfig(attention="fa3")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", PEERS)
@pytest.mark.parametrize("model", ATTENDING)
def test_a_model_is_the_same_by_any_on_a_gpu(toy: ClickDataset, model: str, kind: str) -> None:
    """In bfloat16, as models are trained there: as far from float32 as ours is, and not more."""
    if model == "hstu" and kind not in POINTWISE:
        pytest.skip("hstu's layers have no softmax")
    exact, ours, theirs = (
        logits_and_gradients(
            ranker(toy, model, attention=name, layers=2, heads=1, precision=precision).cuda(),
            batch_of(toy, mixed_rows(toy)).to("cuda"),
        )
        for name, precision in (("jagged", "float32"), ("jagged", "bfloat16"), (kind, "bfloat16"))
    )
    for one, other, wanted in zip(ours, theirs, exact, strict=True):
        largest = 0.03 * float(wanted.abs().max()) + 2 * float((one - wanted).abs().max())
        torch.testing.assert_close(other, wanted, atol=largest, rtol=0.0)

"""Optional peers, against stand-ins with the signatures and the normalisation of the real ones."""

import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor

from jagged_ranking.measure.providers import PROVIDERS, Unavailable, optional
from jagged_ranking.measure.reference import compare, reference
from jagged_ranking.measure.workloads import Workload, setup

_WRAPPER = "BatchPrefillWithRaggedKVCacheWrapper"
LENGTHS = [9, 1, 30, 17]


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    scale: float,
    q_offsets: Tensor | None = None,
) -> Tensor:
    """[T, H, D] in, the same out; users one after another."""
    of_queries = offsets if q_offsets is None else q_offsets
    parts = []
    bounds = zip(pairwise(of_queries.tolist()), pairwise(offsets.tolist()), strict=True)
    for (first, last), (start, end) in bounds:
        scores = torch.einsum("ihd,jhd->hij", q[first:last], k[start:end]) * scale
        parts.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[start:end]))
    return torch.cat(parts)


def fbgemm_stand_in(
    q_weights: Tensor,
    k_weights: Tensor,
    v_weights: Tensor,
    offsets: Tensor,
    max_seq_len: int,
    allow_tf32: bool = True,
) -> Tensor:
    """[H, T, D], no scale, divided by max_seq_len, as fbgemm_gpu.sll does it."""
    q, k, v = (x.transpose(0, 1) for x in (q_weights, k_weights, v_weights))
    return (_attention(q, k, v, offsets, 1.0) / max_seq_len).transpose(0, 1)


def flash_attn_stand_in(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert max_seqlen_k == max(LENGTHS)
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    out = _attention(q, k, v, cu_seqlens_k, q.shape[-1] ** -0.5, cu_seqlens_q)
    return out, q.new_zeros(())


class FlashInferStandIn:
    def __init__(self, workspace: Tensor, kv_layout: str, *, backend: str) -> None:
        assert (workspace.dtype, kv_layout, backend) == (torch.uint8, "NHD", "fa2")

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        *,
        causal: bool,
        q_data_type: torch.dtype,
    ) -> None:
        assert (num_qo_heads, num_kv_heads, head_dim_qk) == (2, 2, 16)
        assert (causal, q_data_type) == (False, torch.float32)
        self.bounds = qo_indptr, kv_indptr

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q_offsets, offsets = self.bounds
        return _attention(q, k, v, offsets, q.shape[-1] ** -0.5, q_offsets).detach()


@pytest.mark.parametrize(
    ("provider", "module", "function", "stand_in", "queries"),
    [
        ("fbgemm_sll", optional.FBGEMM_MODULES[0], optional.FBGEMM_FUNCTION, fbgemm_stand_in, None),
        ("flash_attn_4", "flash_attn.cute", "flash_attn_varlen_func", flash_attn_stand_in, None),
        ("flash_attn_4", "flash_attn.cute", "flash_attn_varlen_func", flash_attn_stand_in, 3),
        ("flashinfer", "flashinfer", _WRAPPER, FlashInferStandIn, None),
        ("flashinfer", "flashinfer", _WRAPPER, FlashInferStandIn, 3),
    ],
)
def test_results_are_those_of_the_reference(
    monkeypatch: pytest.MonkeyPatch,
    provider: str,
    module: str,
    function: str,
    stand_in: object,
    queries: int | None,
) -> None:
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        fake = ModuleType(".".join(parts[:depth]))
        fake.__path__ = []
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(sys.modules[module], function, stand_in, raising=False)
    for check in ("need_cuda", "need_half"):
        monkeypatch.setattr(optional, check, lambda batch, what: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    workload = Workload.from_lengths(
        "x", LENGTHS, heads=2, head_dim=16, dtype=torch.float32, queries=queries
    )
    batch = setup(workload, "cpu")
    ready = PROVIDERS[provider].prepare(batch)
    wanted = reference(batch).parts()
    if PROVIDERS[provider].forward_only:
        got, wanted = ready.compare_as(batch, "forward"), wanted[:1]
    else:
        got = ready.compare_as(batch, "forward+backward")
    for one, other in zip(got, wanted, strict=True):
        assert compare([(one, other)]).relative < 1e-5


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("libcudart.so.12: cannot open"), r"libcudart\.so\.12"),
        (ModuleNotFoundError("No module named 'quack'", name="quack"), r"cannot be used.*'quack'"),
        (ModuleNotFoundError("", name="flash_attn"), "flash_attn.cute is not installed"),
    ],
)
def test_a_broken_installation_is_missing_and_says_why(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def breaks(name: str) -> ModuleType:
        raise error

    monkeypatch.setattr(optional.importlib, "import_module", breaks)
    workload = Workload.from_lengths("x", LENGTHS, heads=2, head_dim=16)
    with pytest.raises(Unavailable, match=message) as caught:
        PROVIDERS["flash_attn_4"].prepare(setup(workload, "cpu"))
    assert caught.value.status == "missing"

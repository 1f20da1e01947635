"""Dense attention: the batch is padded to [B, H, Lmax, D], and padding costs what tokens cost
(candidates are [B, H, N, D] in target attention).

Padding and unpadding happen outside of the timed region, in favour of these providers.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from jagged_ranking.measure.providers.base import (
    FORWARD,
    Prepared,
    Provider,
    Unavailable,
    leaves,
    need_cuda,
    need_half,
    padded_bytes,
    query_bytes,
)
from jagged_ranking.measure.workloads import Batch, Workload

# So many in a padded tensor, and one of SDPA's backends without a mask reads or writes beyond it:
# seen on an H100, with one user of 16,384 tokens among 512 short ones.
MOST_NUMBERS = 2**31


def _key_is_padding(batch: Batch) -> Tensor:
    """[B, 1, 1, Lmax] bool."""
    position = torch.arange(batch.workload.max_len, device=batch.device)
    return (position >= batch.offsets.diff()[:, None])[:, None, None, :]


def _future(batch: Batch) -> Tensor:
    """[Lmax, Lmax] bool, true above the diagonal."""
    n = batch.workload.max_len
    return torch.ones(n, n, dtype=torch.bool, device=batch.device).triu(1)


def of_padded(batch: Batch, padded: Tensor) -> Tensor:
    """[B, H, Lmax, D] as [T, H, D]."""
    user, position = batch.positions()
    return padded.transpose(1, 2)[user, position]


def _queries(batch: Batch, values: Tensor) -> Tensor:
    return of_padded(batch, values) if batch.workload.queries is None else values.transpose(1, 2)


def _prepared(
    batch: Batch,
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    held: tuple[Tensor, ...] = (),
) -> Prepared:
    q, k, v = leaves(*batch.padded()[:3])
    return Prepared(
        forward=lambda: attention(q, k, v),
        inputs=(q, k, v),
        grad_output=batch.padded()[3],
        to_tokens=of_padded,
        to_queries=_queries,
        held=held,
    )


def _prepare_eager(batch: Batch) -> Prepared:
    hidden = _key_is_padding(batch)
    if batch.workload.causal:
        hidden = hidden | _future(batch)
    scale = 1.0 / math.sqrt(batch.workload.head_dim)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q * scale) @ k.transpose(-1, -2)
        return scores.masked_fill_(hidden, -math.inf).softmax(-1) @ v

    return _prepared(batch, attention, (hidden,))


def _scores_bytes(workload: Workload, mode: str) -> int:
    # Scores and probabilities at the same time; backward adds a gradient of their size.
    rows = workload.users * workload.heads * (workload.queries or workload.max_len)
    scores = rows * workload.max_len * workload.dtype.itemsize
    return scores * (2 if mode == FORWARD else 3)


def _prepare_sdpa(batch: Batch) -> Prepared:
    hidden = _key_is_padding(batch)
    if batch.workload.causal:
        hidden = hidden | _future(batch)
    # Of booleans SDPA would make this in each call.
    added = torch.zeros_like(hidden, dtype=batch.q.dtype).masked_fill_(hidden, -math.inf)
    return _prepared(
        batch, lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=added), (added,)
    )


def _unmasked(backend: SDPBackend, batch: Batch) -> Prepared:
    numbers = padded_bytes(batch.workload) // batch.workload.dtype.itemsize
    if numbers >= MOST_NUMBERS:
        # What broke the device leaves no time to whoever comes after it.
        what = f"SDPA's {backend.name} backend"
        raise Unavailable("unsupported", f"{what} breaks the device from 2**31 padded numbers on")
    causal = batch.workload.causal

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return _prepared(batch, attention)


def _prepare_flash(batch: Batch) -> Prepared:
    if batch.device.type == "cuda":
        need_half(batch.q.dtype, "SDPA's FLASH_ATTENTION backend")
        if batch.workload.head_dim > 256:
            raise Unavailable("unsupported", "SDPA's FLASH_ATTENTION backend has head_dim <= 256")
    return _unmasked(SDPBackend.FLASH_ATTENTION, batch)


def _prepare_cudnn(batch: Batch) -> Prepared:
    need_cuda(batch.device, "SDPA's CUDNN_ATTENTION backend")
    need_half(batch.q.dtype, "SDPA's CUDNN_ATTENTION backend")
    if batch.workload.head_dim > 128:
        raise Unavailable("unsupported", "SDPA's CUDNN_ATTENTION backend has head_dim <= 128")
    return _unmasked(SDPBackend.CUDNN_ATTENTION, batch)


def _output_bytes(workload: Workload, mode: str) -> int:
    queries = query_bytes(workload)
    return queries if mode == FORWARD else 2 * queries + 2 * padded_bytes(workload)


DENSE_EAGER = Provider(
    name="dense_eager",
    description="padded; matmul, key padding mask, softmax, matmul, as PyTorch runs them eagerly",
    prepare=_prepare_eager,
    padded=True,
    dense_queries=True,
    bytes_beyond_inputs=_scores_bytes,
)
DENSE_FLASH = Provider(
    name="dense_flash",
    description="padded; SDPA, FLASH_ATTENTION backend. That backend takes no mask: padded keys "
    "take part, and it is checked against exactly that",
    prepare=_prepare_flash,
    padded=True,
    padding_attends=True,
    bytes_beyond_inputs=_output_bytes,
)
DENSE_CUDNN = Provider(
    name="dense_cudnn",
    description="padded; SDPA, CUDNN_ATTENTION backend, without a mask as in dense_flash",
    prepare=_prepare_cudnn,
    padded=True,
    padding_attends=True,
    bytes_beyond_inputs=_output_bytes,
)
DENSE_SDPA = Provider(
    name="dense_sdpa",
    description="padded; SDPA with a key padding mask, whichever backend PyTorch chooses",
    prepare=_prepare_sdpa,
    padded=True,
    dense_queries=True,
    bytes_beyond_inputs=_output_bytes,
)

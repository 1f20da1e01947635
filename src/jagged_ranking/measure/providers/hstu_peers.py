"""HSTU's attention by others: padded PyTorch, and the Triton kernels of its authors where somebody
has them (`generative_recommenders`, github.com/facebookresearch/generative-recommenders).

Triton looks up every name that a kernel mentions; theirs mention some for TMA, which is off here,
that Triton has not had since 3.4. There it takes a package that puts anything in their place.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import silu

from jagged_kernels import lengths_to_offsets
from jagged_ranking.measure.lineup import AUTHORS
from jagged_ranking.measure.pointwise import added, position_buckets, time_buckets, visible_pairs
from jagged_ranking.measure.providers.base import (
    FORWARD,
    Prepared,
    Provider,
    Unavailable,
    leaves,
    need_cuda,
)
from jagged_ranking.measure.providers.dense import of_padded
from jagged_ranking.measure.providers.optional import find
from jagged_ranking.measure.workloads import Batch, Workload

AUTHORS_MODULE = "generative_recommenders.ops.triton.triton_hstu_attention"
AUTHORS_FUNCTION = "triton_hstu_mha"


def _prepare_dense(batch: Batch) -> Prepared:
    """Masks and buckets are made beforehand, in favour of this provider."""
    w = batch.workload
    assert w.hstu is not None
    lengths, place = batch.lengths.to(batch.device), torch.arange(w.max_len, device=batch.device)
    seen = visible_pairs(place, lengths, w.hstu.targets_of(lengths))[:, None].to(w.dtype)
    q, k, v = leaves(*batch.padded()[:3])
    at, learned = (), ()
    if batch.biases is not None:
        times = lengths.new_zeros(w.users, w.max_len)
        times[batch.positions()] = batch.biases.times
        at = position_buckets(place), time_buckets(times)
        tables = (batch.biases.position, batch.biases.time)
        learned = tuple(table.detach().to(w.dtype).requires_grad_() for table in tables)
    scale, share = 1 / math.sqrt(w.head_dim), 1 / w.max_len

    def forward() -> Tensor:
        scores = (q * scale) @ k.transpose(-1, -2)
        if learned:
            scores = scores + added(learned, at)
        # Of what silu returns its backward needs nothing.
        return (silu(scores).mul_(seen) @ v) * share

    return Prepared(
        forward=forward,
        inputs=(q, k, v),
        learned=learned,
        grad_output=batch.padded()[3],
        to_tokens=of_padded,
        held=(seen, *at),
    )


def _dense_bytes(workload: Workload, mode: str) -> int:
    # Scores and weights at the same time, the mask, and with the backward a gradient.
    w = workload
    pairs = w.users * w.max_len**2 * w.dtype.itemsize
    return pairs * (1 + w.heads * (2 if mode == FORWARD else 3))


def _prepare_authors(batch: Batch) -> Prepared:
    """Users lie longest first. That is the order that `sort_by_length` gives them, as its authors'
    benchmark has it, without a sort in each call: in favour of this provider."""
    attention = find(AUTHORS_FUNCTION, (AUTHORS_MODULE,), "generative_recommenders")
    need_cuda(batch.device, "triton_hstu_mha")
    _name_what_triton_dropped()
    w = batch.workload
    if why := _authors_lack(w):
        raise Unavailable("unsupported", why)
    order, place = longest_first(batch)
    moved = (torch.empty_like(x).index_copy_(0, place, x) for x in (batch.q, batch.k, batch.v))
    q, k, v = leaves(*moved)
    offsets = lengths_to_offsets(batch.lengths[order]).to(batch.device, torch.int64)
    targets = batch.targets()
    if targets is not None:
        targets = targets[order.to(batch.device)]
    return Prepared(
        forward=lambda: attention(
            N=w.max_len,
            alpha=1 / math.sqrt(w.head_dim),
            q=q,
            k=k,
            v=v,
            seq_offsets=offsets,
            num_targets=targets,
        ),
        inputs=(q, k, v),
        grad_output=torch.empty_like(batch.dout).index_copy_(0, place, batch.dout),
        # The places are made anew, for whoever is weighed holds none.
        to_tokens=lambda batch, values: values[longest_first(batch)[1]],
        held=(offsets, *(() if targets is None else (targets,))),
    )


def _authors_lack(workload: Workload) -> str:
    dim = workload.head_dim
    if workload.hstu is not None and workload.hstu.biased:
        return "triton_hstu_mha has no biases"
    if dim & (dim - 1) or dim < 16:
        return "triton_hstu_mha has head_dims that are powers of two"
    return ""


def _name_what_triton_dropped() -> None:
    """The authors' kernels name functions that newer Tritons have not, in branches for
    `enable_tma=True`, which are not taken here. Triton looks them up all the same, and does not
    compile the kernels where they are missing; nobody calls them."""
    import triton.language as tl

    for name in ("_experimental_descriptor_load", "_experimental_descriptor_store"):
        if not hasattr(tl, name):
            setattr(tl, name, None)


def longest_first(batch: Batch) -> tuple[Tensor, Tensor]:
    """(users by length, [B] on the CPU; the place of each token where they lie so, [T])."""
    order = batch.lengths.argsort(descending=True, stable=True)
    begins = torch.empty_like(order)
    begins[order] = lengths_to_offsets(batch.lengths[order])[:-1].to(order.dtype)
    user, position = batch.positions()
    return order, begins.to(batch.device)[user] + position


DENSE_HSTU = Provider(
    name="dense_hstu",
    description="padded; matmul, biases, silu, mask, matmul, as PyTorch runs them eagerly",
    prepare=_prepare_dense,
    padded=True,
    softmax=False,
    hstu=True,
    bytes_beyond_inputs=_dense_bytes,
)
HSTU_TRITON = Provider(
    name=AUTHORS,
    description="generative_recommenders' triton_hstu_mha, users longest first; it tunes itself at "
    "the first batch of a shape",
    prepare=_prepare_authors,
    softmax=False,
    hstu=True,
    lacks=_authors_lack,
    tried_apart=True,  # Triton 3.6, H100, the backward on B: an illegal memory access
)

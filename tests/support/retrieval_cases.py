"""Retrieval of key blocks by a plain loop, and what is listed in the same form."""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import DEVICE
from key_cases import offsets_of

from jagged_kernels import JaggedTensor
from jagged_kernels.attention.retrieval import block_means, choice
from jagged_kernels.schedule.keys import transpose

# In the interpreter, and in PyTorch as on a CPU.
BACKENDS = pytest.mark.parametrize("backend", ["triton", "native"])


def jagged(lengths, heads=2, dim=8, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(lengths), heads, dim, generator=generator)
    return JaggedTensor(values.to(DEVICE, dtype), offsets_of(lengths))


def means_of(x, block):
    return [x[i : i + block].double().mean(0) for i in range(0, len(x), block)]


def expected_lists(q, k, *, top_k, newest, block, groups=1, causal=False, categories=None):
    """[(user, tile, group)] -> blocks, one after another."""
    found = {}
    if categories is None:
        categories = [torch.zeros(len(x.values), dtype=torch.int64) for x in (q, k)]
    of_queries, of_keys = (
        [x.split(block) for x in JaggedTensor(of.cpu(), x.offsets.cpu()).unbind()]
        for of, x in zip(categories, (q, k), strict=True)
    )
    heads, kv_heads = q.values.shape[1], k.values.shape[1]
    for user, (queries, keys) in enumerate(zip(q.unbind(), k.unbind(), strict=True)):
        keys = keys.repeat_interleave(heads // kv_heads, 1)
        shift = len(keys) - len(queries)
        for tile, query in enumerate(means_of(queries, block)):
            end = min((tile + 1) * block, len(queries)) + shift if causal else len(keys)
            seen = math.ceil(max(end, 0) / block)
            older = means_of(keys, block)[: max(seen - newest, 0)]
            for group in range(groups):
                part = slice(group * heads // groups, (group + 1) * heads // groups)
                scores = [float((query[part] * key[part]).sum()) for key in older]
                wanted = set(of_queries[user][tile].tolist())
                hold = [c for c in range(len(older)) if wanted & set(of_keys[user][c].tolist())]
                best = sorted(hold, key=lambda c, s=scores: (-s[c], c))
                blocks = {*best[:top_k], *range(max(seen - newest, 0), seen)}
                found[user, tile, group] = sorted(blocks)
    return found


def listed(lists, q):
    found, groups = {}, lists.groups
    for user, n in enumerate(q.lengths.tolist()):
        first = int(q.offsets[user]) // lists.block + user
        for tile in range(-(-n // lists.block)):
            for group in range(groups):
                entry = (first + tile) * groups + group
                begin, end = lists.row_ptr[entry : entry + 2].tolist()
                found[user, tile, group] = (lists.col[begin:end] // 2).tolist()
    return found


def use(monkeypatch, backend):
    for module in (choice, block_means, transpose):
        monkeypatch.setattr(module, "triton_runs", lambda x: backend == "triton")


def categories_of(*sides, kinds=12, dtype=torch.int64):
    """Of the tokens of q and k; few of each kind in a block."""
    generator = torch.Generator().manual_seed(4)
    return tuple(
        torch.randint(-3, kinds - 3, (len(x.values),), generator=generator).to(DEVICE, dtype)
        for x in sides
    )

"""`jagged doctor`: what is on this machine, whether the kernels work, what will be left out."""

import argparse
import importlib.metadata
from collections.abc import Iterator
from typing import Any

from jagged_ranking import paths
from jagged_ranking.devices import default_device, device_name, driver_version
from jagged_ranking.provenance import PEERS, versions
from jagged_ranking.reproduce.click_logs import find_histories
from jagged_ranking.reproduce.parameters import read_preset

# Lengths that the kernels for short, for long and for no users take.
_LENGTHS = (3, 0, 70, 300)
# Ours against the specification in float32, both rounded to the half type: a few of its roundings.
_ALLOWED = {"float32": 1e-4, "bfloat16": 0.05}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`jagged doctor` takes none."""


def run(arguments: argparse.Namespace) -> int:
    """`jagged doctor`: 0, or 1 where the kernels do not give what their specification does."""
    found = versions()
    named = ", ".join(
        f"{name} {found[name] or 'missing'}" for name in ("python", "torch", "triton")
    )
    print(
        f"versions   {paths.DISTRIBUTION} {importlib.metadata.version(paths.DISTRIBUTION)}, {named}"
    )
    device = default_device()
    print(f"device     {device_name(device)}{_remark(device)}")
    wrong = list(check_kernels(device))
    print(f"kernels    {'; '.join(wrong) or 'attention is as its specification, with gradients'}")
    for line in [*_peers(found, device), *_logs(), *_places()]:
        print(line)
    return 1 if wrong else 0


def check_kernels(device: str) -> Iterator[str]:
    """What is wrong with attention on a device, one line a dtype; nothing if it is as specified."""
    import torch

    from jagged_kernels import JaggedTensor, jagged_attention

    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(sum(_LENGTHS), 2, 64, generator=generator).to(device) for _ in range(3)]
    layout = JaggedTensor.from_lengths(drawn[0], torch.tensor(_LENGTHS, device=device))

    def results(inputs: list[torch.Tensor], backend: Any) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        q, k, v = map(layout.with_values, leaves)
        out = jagged_attention(q, k, v, causal=True, backend=backend).values
        gradients = torch.autograd.grad(out.float().square().sum(), leaves)
        return [x.float() for x in (out.detach(), *gradients)]

    for name, allowed in _ALLOWED.items():
        inputs = [x.to(getattr(torch, name)) for x in drawn]
        try:
            ours = results(inputs, "auto")
        except Exception as error:  # of whatever kind: that is what is asked for
            yield f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
            continue
        exact = results([x.float() for x in inputs], "reference")
        off = max(
            float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, exact, strict=True)
        )
        if not off < allowed:
            yield f"{name}: off by {off:.2g} of the largest number; {allowed:g} is allowed"


def _remark(device: str) -> str:
    if device == "cuda":
        return f", driver {driver_version()}"
    return ": no GPU, kernels run as PyTorch; speed and memory here say nothing of a GPU"


def _peers(found: dict[str, str | None], device: str) -> Iterator[str]:
    there = [f"{name} {found[name]}" for name in PEERS if found[name]]
    missing = [name for name in PEERS if not found[name]]
    yield f"peers      {', '.join(there) or 'those of PyTorch alone'}"
    if missing:
        where = "" if device == "cuda" else " (they need a GPU besides)"
        yield f"           not measured, since not installed: {', '.join(missing)}{where}"


def _logs() -> Iterator[str]:
    """Which of the logs that preset `paper` measures lengths of are at hand."""
    wanted = dict.fromkeys(
        name
        for values in read_preset("paper", paths.NOTEBOOKS / "params").values()
        for name in values.get("histories", ())
    )
    there = [name for name in wanted if find_histories(name) is not None]
    missing = [name for name in wanted if name not in there]
    yield f"click logs {paths.shown(paths.DATA)}: {', '.join(there) or 'none of them'}"
    if missing:
        yield f"           left out of preset paper, since not there: {', '.join(missing)}"


def _places() -> Iterator[str]:
    yield f"{'checkout' if paths.has_checkout() else 'installed':<10} {paths.ROOT}"
    yield f"kept       {paths.CACHE} (jagged cache)"

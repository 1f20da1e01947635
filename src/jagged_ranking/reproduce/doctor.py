"""`jagged doctor`: what is on this machine, whether the kernels work, what will be left out."""

import argparse
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jagged_ranking import paths
from jagged_ranking.devices import default_device, device_name
from jagged_ranking.facts import add_json, say
from jagged_ranking.first_line import described
from jagged_ranking.provenance import PEERS, versions
from jagged_ranking.reproduce.click_logs import find_histories
from jagged_ranking.reproduce.parameters import read_preset

# Lengths that the kernels for short, for long and for no users take.
_LENGTHS = (3, 0, 70, 300)
# Ours against the specification in float32, both rounded to the half type: a few of its roundings.
_ALLOWED = {"float32": 1e-4, "bfloat16": 0.05}
KEYS = {
    "version": "of this project",
    "versions": "name -> version (null: not there) of what decides results",
    "device": "type (cuda or cpu) and name",
    "kernels": "what is wrong with them, a text each; empty: as their specification",
    "peers": "name -> version of those measured where installed (null: not there)",
    "click_logs": "name -> place of those of preset paper (null: not there)",
    "data": "the folder that they are looked for in",
    "root": "the checkout, or the installed package",
    "checkout": "whether it is a checkout",
    "cache": "where results are kept",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `jagged doctor`."""
    add_json(parser, KEYS)


def run(arguments: argparse.Namespace) -> int:
    """`jagged doctor`: 0, or 1 where the kernels do not give what their specification does."""
    facts = find_facts()
    say(arguments, facts, _lines(facts))
    return 1 if facts["kernels"] else 0


def find_facts() -> dict[str, Any]:
    """What `--json` prints, see KEYS."""
    found = versions()
    device = default_device()
    logs = {name: find_histories(name) for name in _wanted_logs()}
    return {
        "version": importlib.metadata.version(paths.DISTRIBUTION),
        "versions": {name: found[name] for name in found if name not in PEERS},
        "device": {"type": device, "name": device_name(device)},
        "kernels": list(check_kernels(device)),
        "peers": {name: found[name] for name in PEERS},
        "click_logs": {name: str(place) if place else None for name, place in logs.items()},
        "data": str(paths.DATA),
        "root": str(paths.ROOT),
        "checkout": paths.has_checkout(),
        "cache": str(paths.CACHE),
    }


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
            yield f"{name}: {described(error)}"
            continue
        exact = results([x.float() for x in inputs], "reference")
        off = max(
            float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, exact, strict=True)
        )
        if not off < allowed:
            yield f"{name}: off by {off:.2g} of the largest number; {allowed:g} is allowed"


def _wanted_logs() -> list[str]:
    """The logs that preset `paper` measures lengths of."""
    presets = read_preset("paper", paths.NOTEBOOKS / "params").values()
    return list(dict.fromkeys(name for values in presets for name in values.get("histories", ())))


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    known, device = facts["versions"], facts["device"]
    named = ", ".join(
        f"{name} {known[name] or 'missing'}" for name in ("python", "torch", "triton")
    )
    yield f"versions   {paths.DISTRIBUTION} {facts['version']}, {named}"
    cuda = device["type"] == "cuda"
    no_gpu = ": no GPU, kernels run as PyTorch; speed and memory here say nothing of a GPU"
    yield f"device     {device['name']}" + (f", driver {known['driver']}" if cuda else no_gpu)
    wrong = "; ".join(facts["kernels"])
    yield f"kernels    {wrong or 'attention is as its specification, with gradients'}"
    there, missing = _split(facts["peers"])
    named = ", ".join(f"{name} {facts['peers'][name]}" for name in there)
    yield f"peers      {named or 'those of PyTorch alone'}"
    if missing:
        where = "" if cuda else " (they need a GPU besides)"
        yield f"           not measured, since not installed: {', '.join(missing)}{where}"
    there, missing = _split(facts["click_logs"])
    where = paths.shown(Path(facts["data"]))
    yield f"click logs {', '.join(there) or 'none of them'} in {where}/"
    if missing:
        yield f"           left out of preset paper, since not there: {', '.join(missing)}"
    yield f"{'checkout' if facts['checkout'] else 'installed':<10} {facts['root']}"
    yield f"kept       {facts['cache']} (jagged cache)"


def _split(found: dict[str, str | None]) -> tuple[list[str], list[str]]:
    """The names that have something, and those that have nothing."""
    there = [name for name, value in found.items() if value]
    return there, [name for name in found if name not in there]

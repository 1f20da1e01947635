"""DistributedDataParallel finds the tensors in jagged outputs: two processes on the CPU."""

from __future__ import annotations

import json

from processes import run_python

CODE = """
import json, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from jagged_kernels import JaggedTensor, jagged2_like

FOLDER, *OPTIONS = sys.argv[1:]

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        m = jagged2_like(x)
        squares = m.with_values(m.values + self.scale)
        return {"tokens": [x.with_values(self.used(x.values))], "squares": squares}

def train(rank, option):
    torch.manual_seed(0)
    x = JaggedTensor(torch.full((5, 2), float(rank)), torch.tensor([0, 2, 5]))
    model = DistributedDataParallel(Layer(), **{option: True})
    steps = []
    for _ in range(3):
        model.zero_grad()
        out = model(x)
        tokens, squares = out["tokens"][0], out["squares"]
        assert tokens.offsets is x.offsets and squares.offsets is x.offsets
        (tokens.values.sum() + (rank + 1) * squares.values.sum()).backward()
        layer = model.module
        gradients = [layer.used.weight.grad, layer.scale.grad, layer.unused.weight.grad]
        steps.append([None if g is None else g.tolist() for g in gradients])
    return steps

def work(rank):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/met", rank=rank, world_size=2)
    steps = {option: train(rank, option) for option in OPTIONS}
    with open(f"{FOLDER}/{rank}.json", "w") as file:
        json.dump(steps, file)
    dist.destroy_process_group()

torch.multiprocessing.start_processes(work, nprocs=2, start_method="fork")
"""


def test_gradients_are_means_over_processes(tmp_path):
    options = ["find_unused_parameters", "static_graph"]
    ran = run_python(CODE, str(tmp_path), *options, OMP_NUM_THREADS="1")
    assert ran.returncode == 0, ran.stderr
    # Tokens are all 0 in one process, all 1 in the other; 13 scores, weighed by 1 and by 2.
    step = [[[2.5, 2.5], [2.5, 2.5]], 19.5, None]
    for rank in (0, 1):
        steps = json.loads((tmp_path / f"{rank}.json").read_text())
        assert steps == {option: [step] * 3 for option in options}

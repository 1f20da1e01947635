"""The examples in docstrings, and of the READMEs, are what happens.

An example knows what `import torch` and `from <package> import *` give its reader, and nothing
else. Examples are found in the source: files that only a GPU can import need not be imported.
"""

import ast
import doctest
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jagged_kernels
from jagged_kernels import JaggedTensor

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"jagged_kernels": "kernels", "jagged_ranking": "src", "click_data": "data_prep"}
# Whose examples need a library that the packages do not require.
OPTIONAL = {"to_torchrec": "torchrec"}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef


def _examples() -> Iterator[tuple[str, doctest.DocTest]]:
    """(package, its examples), one for each docstring that has some."""
    parser = doctest.DocTestParser()
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder / package).rglob("*.py")):
            where = path.relative_to(ROOT).as_posix()
            source = path.read_text(encoding="utf-8")
            if ">>>" not in source:
                continue
            for node in ast.walk(ast.parse(source)):
                if not isinstance(node, DOCUMENTED) or not (text := ast.get_docstring(node, False)):
                    continue
                name = f"{where}:{getattr(node, 'name', '')}"
                line = node.body[0].lineno - 1
                test = parser.get_doctest(text, {}, name, str(path), line)
                if test.examples:
                    yield package, test


@pytest.mark.parametrize(
    ("package", "test"), [pytest.param(*both, id=both[1].name) for both in _examples()]
)
def test_an_example_says_what_happens(package, test):
    if library := OPTIONAL.get(test.name.rpartition(":")[2]):
        pytest.importorskip(library)
    exec(f"import torch\nfrom {package} import *", test.globs)
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not said, "".join(said)


@pytest.mark.parametrize("name", jagged_kernels.__all__)
def test_a_public_name_of_the_kernels_has_an_example_with_a_result(name):
    tests = doctest.DocTestFinder().find(getattr(jagged_kernels, name), name)
    assert any(example.want for test in tests for example in test.examples)


def _kernels_readme() -> tuple[str, ...]:
    """Its blocks of Python: what it begins with, the model, and serving."""
    text = (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")
    first, model, served = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return first, model, served


def test_the_kernels_readme_says_the_shapes_that_there_are():
    for code in _kernels_readme()[:2]:
        namespace: dict[str, Any] = {}
        exec(code, namespace)
        said = re.findall(r"^ *(\w+) = .*# \[([\d, ]+)\]$", code, re.MULTILINE)
        assert said
        for name, shape in said:
            result = namespace[name]
            values = result.values if isinstance(result, JaggedTensor) else result
            assert ", ".join(map(str, values.shape)) == shape, name


def test_the_kernels_readme_s_model_is_one_of_each_user_by_plain_pytorch():
    told: dict[str, Any] = {}
    exec(_kernels_readme()[1], told)
    model, heads = told["model"], told["model"].heads
    item, category, candidates = told["item"], told["category"], told["candidates"]

    def attend(q, k, v, mask=None):
        scores = torch.einsum("nhd,mhd->hnm", q, k) / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask, -torch.inf)
        return torch.einsum("hnm,mhd->nhd", scores.softmax(2), v).flatten(1)

    rows = []
    for user, (ids, kinds) in enumerate(zip(item, category, strict=True)):
        x = torch.nn.functional.gelu((model.item[ids] + model.category[kinds]) @ model.mix[0])
        q, k, v = model.project(x).unflatten(1, (3, heads, -1)).unbind(1)
        later = torch.ones(len(x), len(x), device=x.device).triu(1).bool()
        x = x + attend(q, k, v, later)
        asking = model.item[candidates[user]]
        q, k, v = (
            torch.nn.functional.linear(of, weight, bias).unflatten(1, (heads, -1))
            for of, weight, bias in zip(
                (asking, x, x),
                model.ask.in_proj_weight.chunk(3),
                model.ask.in_proj_bias.chunk(3),
                strict=True,
            )
        )
        answer = model.ask.out_proj(attend(q, k, v)) * asking
        pooled = x.mean(0) if len(x) else x.sum(0)
        both = torch.cat([answer, pooled.expand_as(answer)], 1)
        rows.append(model.head(both).squeeze(1))
    plain = torch.stack(rows)
    logits = model(item, category, candidates, told["schedule"])
    torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-5)

    names, parameters = zip(*model.named_parameters(), strict=True)
    ours = torch.autograd.grad(logits.square().sum(), parameters)
    theirs = torch.autograd.grad(plain.square().sum(), parameters)
    for name, grad, expected in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(
            grad, expected, rtol=1e-3, atol=1e-4, msg=lambda said, name=name: f"{name}: {said}"
        )


def test_the_kernels_readme_serves_what_attention_over_all_events_gives():
    told: dict[str, Any] = {}
    exec(_kernels_readme()[2], told)
    k, v = told["cache"].gather()
    new, out = told["new"], told["out"]
    assert k.lengths.tolist() == [6, 5]
    expected = jagged_kernels.jagged_attention(new, k, v, causal=True)
    torch.testing.assert_close(out.values, expected.values)


def test_the_readme_s_code_runs_in_its_order():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    use, biases, there_already, batches = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    told: dict[str, Any] = {}
    for code in (use, biases):
        exec(code, told)
    assert told["y"].values.shape == (253, 4, 64)
    assert told["user"].shape == (3, 1, 4, 64)

    device = told["device"]
    users = [torch.randn(n, 4, 16, device=device) for n in (3, 2, 4)]
    told["q"] = told["k"] = told["v"] = torch.cat(users)
    told["cu_seq"], told["longest"] = torch.tensor([0, 3, 5, 9], dtype=torch.int32).to(device), 4
    told["nested"] = torch.nested.nested_tensor(users, layout=torch.jagged)
    ids, lengths = torch.arange(3, device=device), torch.tensor([2, 1], device=device)
    told["keyed_jagged_tensor"] = SimpleNamespace(
        keys=lambda: ["item"], values=lambda: ids, lengths=lambda: lengths
    )
    dataset = pytest.importorskip("datasets").Dataset
    told["dataset"] = dataset.from_dict({"history": [[1, 2], [], [3]]})
    exec(there_already, told)
    assert told["y"].is_nested
    assert [tokens.tolist() for tokens in told["x"]] == [[1, 2], [], [3]]

    told["samples"] = [
        {"item": torch.arange(n), "time": torch.arange(n), "label": 1} for n in (3, 0, 2, 5)
    ]
    exec(batches, told)
    assert told["item"].offsets is told["time"].offsets
    assert [tokens.tolist() for tokens in told["some"]] == [[0, 1, 2, 3, 4], []]

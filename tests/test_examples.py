"""The examples in docstrings, and of the kernels' README, are what happens.

An example knows what `import torch` and `from <package> import *` give its reader, and nothing
else. Examples are found in the source: files that only a GPU can import need not be imported.
"""

import ast
import doctest
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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


def test_the_kernels_readme_says_the_shapes_that_there_are():
    text = (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    said = re.findall(r"^(\w+) = .*# \[([\d, ]+)\]$", code, re.MULTILINE)
    assert said
    for name, shape in said:
        result = namespace[name]
        values = result.values if isinstance(result, JaggedTensor) else result
        assert ", ".join(map(str, values.shape)) == shape, name

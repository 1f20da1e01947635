"""The form of every notebook, and that every preset fits them."""

import ast
import json
from pathlib import Path

import nbformat
import papermill
import pytest

from jagged_ranking.reproduce.parameters import check_values, read_parameters, read_preset
from jagged_ranking.reproduce.run_data import SAMPLE, SOURCE
from jagged_ranking.reproduce.train_options import read_options

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PRESETS = ["paper", "small", "smoke"]
PACKAGES = {"jagged_kernels", "jagged_ranking", "click_data"}

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    cells = nbformat.read(path, as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def test_the_notebooks_are_there():
    assert [path.stem for path in NOTEBOOKS] == [
        "01_speed",
        "02_memory",
        "03_target_attention",
        "04_quality",
        "05_interaction_kernels",
        "06_history_length",
        "07_hstu",
        "08_sparse_attention",
        "09_history_cache",
        "10_training_throughput",
        "11_serving",
        "12_scaling",
    ]
    assert sorted(path.stem for path in (FOLDER / "params").glob("*")) == PRESETS


@each_notebook
def test_stored_without_outputs(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    nbformat.validate(notebook)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) >= (4, 5)  # cells have ids
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
    for cell in notebook["cells"]:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
        assert set(cell["metadata"]) <= {"tags"}


@each_notebook
def test_one_parameters_cell_first(path):
    tags = [cell.metadata.get("tags", []) for cell in code_cells(path)]
    assert tags[0] == ["parameters"]
    assert not any(tags[1:])
    known = read_parameters(path)
    assert {"out", "preset", "data"} <= set(known)
    assert known["out"].default is None
    assert known["data"].default is None
    assert known["preset"].default == "interactive"
    assert all(parameter.description for parameter in known.values())


@each_notebook
def test_papermill_knows_the_parameters(path):
    unknown = set(read_parameters(path)) - set(papermill.inspect_notebook(path))
    # of which one number may be None
    assert unknown <= {"sigmas"}, "papermill warns of them as unknown, and lists them in no help"


@each_notebook
def test_thin(path):
    cells = code_cells(path)
    assert len(cells) <= 12
    for cell in cells:
        assert not cell.source.lstrip().startswith(("%", "!"))
        for node in ast.walk(ast.parse(cell.source)):
            assert not isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
            )
            if isinstance(node, ast.Import):
                imported = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                imported = {(node.module or "").split(".")[0]}
            else:
                continue
            assert imported <= PACKAGES, cell.source


@each_notebook
def test_every_parameter_is_used(path):
    parameters, *others = code_cells(path)
    source = "\n".join(cell.source for cell in others)
    assert names(parameters.source) - {"None", "str", "int", "float", "bool", "list", "dict"} <= (
        names(source)
    )


def names(source: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


@each_notebook
def test_opens_with_claim_expectation_and_time(path):
    first = nbformat.read(path, as_version=4).cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith(f"# {path.stem[:2]} ")
    for said in ("The paper's claim", "What to expect", "How long, and on what"):
        assert said in first.source


@each_notebook
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_fit(path, preset):
    values = read_preset(preset, FOLDER / "params")[path.stem]
    known = read_parameters(path)
    assert check_values(values, known, path.stem) == values
    assert read_options(values, path) == values
    assert not {"out", "preset", "data"} & set(values)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_name_notebooks_only(preset):
    content = read_preset(preset, FOLDER / "params")
    assert set(content) - {SAMPLE} == {SOURCE, *(path.stem for path in NOTEBOOKS)}


@pytest.mark.parametrize("preset", PRESETS)
def test_speed_and_memory_are_measured_on_the_same_batches(preset):
    content = read_preset(preset, FOLDER / "params")
    effort = {"rounds", "repeats", "seconds"}
    speed = {key: value for key, value in content["01_speed"].items() if key not in effort}
    assert speed == content["02_memory"]

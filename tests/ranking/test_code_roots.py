"""What code a result depends on: the table is whole, and nothing else makes a result stale."""

from pathlib import Path

import pytest
from import_graph import PACKAGES, ROOT, arrows, imports, modules, origin

from jagged_ranking import code_roots
from jagged_ranking.code_roots import CODE_FOLDERS, ROOTS, code_hash, has_changed, roots_of

# They say where a result comes from, how a run ends or what it found, and decide no number of it.
SAID_ONLY = {f"jagged_ranking.{name}" for name in ("paths", "devices", "processes", "facts")}
RANKING = "src/jagged_ranking"
SPEED, INTERACTION, QUALITY = "01_speed", "05_interaction_kernels", "04_quality"
HISTORY, POINTWISE, SPARSE = "06_history_length", "07_hstu", "08_sparse_attention"
STEPS, SERVED = "10_training_throughput", "11_serving"
SCALING, CACHED = "12_scaling", "09_history_cache"
TRAINED = {QUALITY, HISTORY, CACHED, STEPS, SERVED, SCALING}
NOTEBOOKS = TRAINED | {SPEED, INTERACTION, POINTWISE, SPARSE}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A file for each root, and files that no result depends on."""
    places = {root for roots in ROOTS.values() for root in roots}
    beside = {"notebooks", "docs", f"{RANKING}/figures", f"{RANKING}/provenance.py"}
    for place in places | beside:
        path = tmp_path / place
        if path.suffix != ".py":
            path = path / "inner" / "a.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"x = '{place}'\n")
    return tmp_path


def test_the_hash_follows_content_and_place_of_code_only(checkout: Path) -> None:
    before = code_hash(checkout)
    (checkout / "notebooks" / "inner" / "a.py").write_text("other")
    (checkout / "src" / "notes.txt").write_text("not code")
    assert code_hash(checkout) == before
    inner = checkout / "kernels" / "inner"
    (inner / "a.py").rename(inner / "b.py")
    moved = code_hash(checkout)
    (inner / "b.py").write_text("x = 2\n")
    assert len({before, moved, code_hash(checkout)}) == 3


@pytest.mark.parametrize(
    ("place", "stale"),
    [
        ("kernels/jagged_kernels/schedule/inner/a.py", NOTEBOOKS),
        ("kernels/jagged_kernels/cache/inner/a.py", TRAINED | {CACHED}),
        (f"{RANKING}/measure/timing.py", NOTEBOOKS - {QUALITY, SCALING}),
        (f"{RANKING}/measure/providers/inner/a.py", NOTEBOOKS - {QUALITY, SCALING}),
        (f"{RANKING}/measure/cached/inner/a.py", {CACHED}),
        (f"{RANKING}/measure/interaction/inner/a.py", {INTERACTION, CACHED}),
        (f"{RANKING}/measure/sparse/inner/a.py", {SPARSE}),
        (
            f"{RANKING}/reproduce/attention_study.py",
            {SPEED, INTERACTION, POINTWISE, SPARSE, CACHED},
        ),
        (f"{RANKING}/reproduce/hstu_study.py", {POINTWISE}),
        (f"{RANKING}/reproduce/scaling_worker.py", {SCALING}),
        (f"{RANKING}/reproduce/interaction_study.py", {INTERACTION}),
        (f"{RANKING}/reproduce/history_study.py", {HISTORY, CACHED}),
        (f"{RANKING}/reproduce/sparse_study.py", {SPARSE}),
        (f"{RANKING}/reproduce/step_contest.py", {HISTORY, STEPS, SERVED}),
        (f"{RANKING}/reproduce/throughput_study.py", {STEPS}),
        (f"{RANKING}/reproduce/serving_study.py", {SERVED}),
        (f"{RANKING}/reproduce/serving_contest.py", {SERVED}),
        (f"{RANKING}/models/inner/a.py", TRAINED),
        (f"{RANKING}/training/inner/a.py", TRAINED),
        ("data_prep/inner/a.py", TRAINED),
        (f"{RANKING}/figures/inner/a.py", set()),
        (f"{RANKING}/provenance.py", set()),
        ("docs/inner/a.py", set()),
    ],
)
def test_a_change_makes_stale_what_depends_on_it(
    checkout: Path, place: str, stale: set[str]
) -> None:
    before = {name: code_hash(checkout, roots_of(name)) for name in NOTEBOOKS}
    (checkout / place).write_text("changed\n")
    after = {name: code_hash(checkout, roots_of(name)) for name in NOTEBOOKS}
    assert {name for name in NOTEBOOKS if before[name] != after[name]} == stale


def test_the_table_names_every_notebook_and_what_exists() -> None:
    notebooks = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert notebooks == {name for name in ROOTS if name[0].isdigit()}
    for root in {root for roots in (*ROOTS.values(), code_roots.FIGURES) for root in roots}:
        assert (ROOT / root).exists(), root
    assert roots_of("mine") == CODE_FOLDERS
    assert roots_of("jagged_ranking.training.experiment") == ROOTS[QUALITY]
    measure = "jagged_ranking.measure"
    assert roots_of(f"{measure}.benchmark") == ROOTS[measure]
    assert roots_of(f"{measure}.sparse.sparse_measurement") == ROOTS[f"{measure}.sparse"]


@pytest.mark.parametrize("name", ROOTS)
def test_whatever_a_root_imports_is_a_root(name: str) -> None:
    """The notebooks' own files of `reproduce` decide by their own text what is measured: what they
    import runs it, or is in the manifest by its digest."""
    places = [ROOT / root for root in roots_of(name)]
    inside = {
        module
        for module, path in modules().items()
        if any(path == place or path.is_relative_to(place) for place in places)
    }
    assert inside
    for module in inside:
        if module.startswith("jagged_ranking.reproduce"):
            continue
        used = {origin(source, what) for source, what, _ in imports(module)} & set(modules())
        assert used <= inside | SAID_ONLY, module


def test_every_package_is_code() -> None:
    assert {str(path.parent.relative_to(ROOT)) for path in PACKAGES.values()} == set(CODE_FOLDERS)
    assert all(arrows(package) for package in PACKAGES)


def test_a_result_has_changed_when_its_own_code_has(checkout: Path) -> None:
    roots = roots_of(SPEED)
    made = {"code_roots": list(roots), "code_hash": code_hash(checkout, roots)}
    of_old = {"code_hash": code_hash(checkout)}
    assert not has_changed(made, checkout)
    assert not has_changed(of_old, checkout)
    (checkout / RANKING / "figures" / "inner" / "a.py").write_text("changed\n")
    assert not has_changed(made, checkout)
    assert has_changed(of_old, checkout)
    room = "kernels/jagged_kernels/attention"
    (checkout / room / "inner" / "a.py").write_text("changed\n")
    assert has_changed(made, checkout)
    assert has_changed({}, checkout)

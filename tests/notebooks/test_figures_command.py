"""`jagged figures` redraws from committed results, says what changed, and is then at rest."""

import json
from pathlib import Path

import pytest
from made_up_results import MANIFEST, interaction_results, target_results
from processes import run_python

from jagged_ranking import results
from jagged_ranking.cli import main

MARKS = "# A\n\n<!-- results:begin -->\n<!-- results:end -->\n\nafter\n"


@pytest.fixture
def committed(checkout):
    """A checkout with committed results of one model on one dataset."""
    folder = checkout / "figures" / "04_quality"
    rows = [
        results.row(
            op="ranking", provider=model, workload="toy", mode="test", metric=metric, unit="1",
            value=0.7, config={"seed": seed}, run_id="04_quality",
        )
        for model in ("mean_pool", "din")
        for metric in ("auc", "gauc", "ne", "log_loss")
        for seed in (0, 1)
    ]  # fmt: skip
    results.write(results.frame(rows), folder / "results.parquet")
    manifest = {
        "id": "04_quality",
        "preset": "small",
        "device": "CPU",
        "git_sha": "abc",
        "git_dirty": False,
        "versions": {"torch": "2.13.0"},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (checkout / "README.md").write_text(f"{MARKS}\n{MARKS.replace('results', 'operations')}")
    (checkout / "docs").mkdir()
    (checkout / "docs" / "performance.md").write_text(MARKS.replace("results", "goals"))
    return checkout


def test_a_second_run_changes_nothing(committed, capsys):
    assert main(["figures"]) == 0
    out = capsys.readouterr().out
    drawn = list((committed / "figures" / "04_quality").glob("*.svg"))
    assert drawn
    assert all(path.name in out for path in drawn)
    readme = (committed / "README.md").read_text()
    assert "README.md" in out
    assert "performance.md" in out
    assert "Not measured." in (committed / "docs" / "performance.md").read_text()
    assert "0.7000" in readme
    assert readme.startswith("# A\n\n<!-- results:begin -->")
    assert "<!-- results:end -->\n\nafter\n" in readme
    assert "| `jagged_sum` |" in readme
    assert readme.endswith("<!-- operations:end -->\n\nafter\n")

    assert main(["figures"]) == 0
    assert capsys.readouterr().out == "nothing changed\n"

    drawn[0].write_text("<svg/>")
    assert main(["figures", str(committed / "figures" / "04_quality")]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "files changed: 1"
    assert drawn[0].name in out


def test_it_needs_neither_torch_nor_the_kernels(committed: Path) -> None:
    """Nor do the goals and the table of operations, which are about what both measure."""
    made = {
        "03_target_attention": results.select(target_results(), workload=["T1", "T2"]),
        "05_interaction_kernels": results.select(interaction_results(), op="jagged_sum"),
    }
    for name, table in made.items():
        folder = committed / "figures" / name
        results.write(table, folder / "results.parquet")
        (folder / "manifest.json").write_text(json.dumps({**MANIFEST, "id": name}))
    blocked = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.partition('.')[0] in ('torch', 'triton', 'jagged_kernels'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from jagged_ranking.cli import main\n"
        "sys.exit(main(['figures']))"
    )
    done = run_python(blocked, JAGGED_HOME=str(committed), JAGGED_TRACEBACK="1")
    assert done.returncode == 0, done.stderr
    for name in ("README.md", "docs/performance.md"):
        assert "jagged_sum" in (committed / name).read_text()
    for name in ("03_target_attention_ratios", "05_interaction_kernels_limit"):
        assert list(committed.glob(f"figures/*/{name}.svg"))


def test_wrong_folders_and_readmes_are_one_line(committed, capsys):
    assert main(["figures", "nowhere"]) == 1
    assert "no such folder" in capsys.readouterr().err
    assert main(["figures", str(committed / "docs")]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"{committed / 'docs'}: no results.parquet with a manifest.json" in err
    (committed / "README.md").write_text("nothing to fill in\n")
    assert main(["figures"]) == 1
    err = capsys.readouterr().err
    assert "results:begin" in err
    assert err.count("\n") == 1

"""`jagged figures` redraws from committed results, says what changed, and is then at rest."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from left_results import save_run
from made_up_cached import cached_results
from made_up_rankers import history_results, serving_results, throughput_results
from made_up_results import (
    MANIFEST,
    hstu_results,
    interaction_results,
    sparse_results,
    target_results,
)
from made_up_scaling import scaling_results
from processes import run_python

from jagged_ranking import results
from jagged_ranking.cli import main
from jagged_ranking.code_roots import code_hash
from jagged_ranking.figures import style

MARKS = "# A\n\n<!-- results:begin -->\n<!-- results:end -->\n\nafter\n"


@pytest.fixture
def committed(checkout, write_quality):
    """A checkout with committed results of two models on one dataset."""
    write_quality(checkout / "figures" / "04_quality")
    (checkout / "README.md").write_text(f"{MARKS}\n{MARKS.replace('results', 'operations')}")
    (checkout / "docs").mkdir()
    (checkout / "docs" / "results.md").write_text(MARKS)
    (checkout / "docs" / "performance.md").write_text(MARKS.replace("results", "goals"))
    return checkout


def test_a_second_run_changes_nothing(committed, capsys):
    assert main(["figures"]) == 0
    out = capsys.readouterr().out
    drawn = list((committed / "figures" / "04_quality").glob("*.svg"))
    assert drawn
    assert all(path.name in out for path in drawn)
    readme = (committed / "README.md").read_text()
    page = (committed / "docs" / "results.md").read_text()
    assert all(name in out for name in ("README.md", "results.md", "performance.md"))
    assert "Not measured." in (committed / "docs" / "performance.md").read_text()
    assert "| mean-pool | 0.7000 |" in readme
    assert "0.7000 ± 0.0000" in page
    assert all(path.name in page for path in drawn)
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


def test_it_says_when_the_code_behind_results_has_changed(
    committed: Path, write_quality: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the caption and on the pages, by hashes alone; and only where that code has."""
    roots = ["kernels", "src/models"]
    code = committed / "kernels" / "a.py"
    code.parent.mkdir()
    code.write_text("x = 1\n")
    made = {"code_roots": roots, "code_hash": code_hash(committed, roots)}
    monkeypatch.setattr(style, "FORMATS", ("svg",))
    folder = committed / "figures" / "04_quality"
    write_quality(folder, **made)

    def drawn() -> tuple[bytes, str]:
        assert main(["figures"]) == 0
        said = [(committed / name).read_text() for name in ("README.md", "docs/results.md")]
        return (folder / "04_quality_scores.svg").read_bytes(), "\n".join(said)

    figure, pages = drawn()
    assert pages.count("code abc*") == 2
    elsewhere = committed / "src" / "figures" / "b.py"
    elsewhere.parent.mkdir(parents=True)
    elsewhere.write_text("y = 1\n")
    assert drawn() == (figure, pages)
    code.write_text("x = 2\n")
    other, said = drawn()
    assert other != figure
    assert said.count("code abc, changed since*") == 2
    assert drawn() == (other, said)
    code.write_text("x = 1\n")
    assert drawn() == (figure, pages)


def test_it_needs_neither_torch_nor_the_kernels(committed: Path) -> None:
    """Nor do the goals and the table of operations, which are about what both measure."""
    made = {
        "03_target_attention": results.select(target_results(), workload=["T1", "T2"]),
        "05_interaction_kernels": results.select(interaction_results(), op="jagged_sum"),
        "06_history_length": results.select(history_results(), workload="synthetic_far"),
        "07_hstu": results.select(hstu_results(), op="hstu", workload="B"),
        "08_sparse_attention": results.select(sparse_results(), workload="length 16384"),
        "09_history_cache": cached_results(),
        "10_training_throughput": results.select(throughput_results(), workload="waste 85%"),
        "11_serving": serving_results(),
        "12_scaling": scaling_results(),
    }
    for name, table in made.items():
        save_run(committed / "figures" / name, table, {**MANIFEST, "id": name})
    blocked = (  # one format is enough, and that it would be written
        "import os, sys\n"
        "os.cpu_count = lambda: 1\n"  # all in this process
        "class Block:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.partition('.')[0] in ('torch', 'triton', 'jagged_kernels'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from jagged_ranking.cli import main\n"
        "from jagged_ranking.figures import style\n"
        "style.FORMATS = ('svg',)\n"
        "style.Figure.savefig = lambda figure, file, **how: file.write(how['format'].encode())\n"
        "sys.exit(main(['figures']))"
    )
    done = run_python(blocked, JAGGED_HOME=str(committed), JAGGED_TRACEBACK="1")
    assert done.returncode == 0, done.stderr
    for name in ("README.md", "docs/results.md", "docs/performance.md"):
        assert "jagged_sum" in (committed / name).read_text()
    drawn = ("03_target_attention_ratios", "05_interaction_kernels_limit")
    drawn += ("06_history_length_transformer", "07_hstu_ratios", "08_sparse_attention_speedup")
    drawn += ("09_history_cache_decode", "10_training_throughput_parts", "11_serving_latency")
    drawn += ("12_scaling_simulated",)
    for name in drawn:
        assert list(committed.glob(f"figures/*/{name}.svg"))


@pytest.mark.parametrize(
    "content", ["{", '{"preset": "small"}', '{"preset": 3, "id": "04_quality"}']
)
def test_a_broken_manifest_is_one_line_that_names_it(committed, capsys, content):
    path = committed / "figures" / "04_quality" / "manifest.json"
    path.write_text(content)
    assert main(["figures"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"{path}: not a manifest" in err


def test_a_full_disk_is_named_with_the_figure(committed, capsys, monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")  # as `write` of a file raises it

    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # all in this process
    assert main(["figures"]) == 1
    assert "No space left on device: '" in (err := capsys.readouterr().err)
    assert err.endswith(f"{style.FORMATS[0]}'\n")
    assert not list((committed / "figures" / "04_quality").glob(".*"))


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

"""`--json`: one document on stdout, with the keys that the help says."""

import json
import math
import re
from pathlib import Path

import pytest

from click_data import SOURCES
from jagged_ranking import paths
from jagged_ranking.cli import main
from jagged_ranking.facts import document
from jagged_ranking.provenance import write_manifest
from jagged_ranking.reproduce.run_record import RunRecord

COMMANDS = {
    "datasets": [],
    "doctor": [],
    "cache": [],
    "reproduce": ["--dry-run", "--only", "01"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_document_has_the_keys_that_the_help_says(command, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(paths.BUILD_VARIABLE, str(tmp_path))
    assert main([command, *COMMANDS[command], "--json"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    keys = capfd.readouterr().out.partition("keys of the JSON document:\n")[2]
    assert list(json.loads(out)) == re.findall(r"^  (\w+) ", keys, re.MULTILINE)
    assert not list(tmp_path.iterdir())


def test_datasets_as_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(paths.DATA_VARIABLE, str(tmp_path))
    (tmp_path / "ml_100k").mkdir()
    assert main(["datasets", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(SOURCES) == {source["name"] for source in found["sources"]}
    here = {known["name"]: known["path"] for known in found["public"] if known["path"]}
    assert here == {"ml-100k": str(tmp_path / "ml_100k")}
    assert found["folder"] == str(tmp_path)


def test_a_plan_as_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(paths.BUILD_VARIABLE, str(tmp_path))
    assert main(["reproduce", "--dry-run", "--json", "--out", str(tmp_path / "o")]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["data"]["there"] is False
    assert Path(plan["data"]["folder"]).parent == tmp_path / "data"
    assert Path(plan["data"]["folder"]).name.startswith("synthetic-smoke-")
    assert plan["notebooks"]["01_speed"] == "run"
    assert plan["report"] == str(tmp_path / "o" / "report.html")


def test_the_cache_as_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(paths.BUILD_VARIABLE, str(tmp_path))
    kept = tmp_path / "cache"
    kept.mkdir()
    (kept / "a.parquet").write_bytes(b"x" * 7)
    for option, deleted in (([], False), (["--clear"], True)):
        assert main(["cache", "--json", *option]) == 0
        facts = {"folder": str(kept), "files": 1, "bytes": 7, "deleted": deleted}
        assert json.loads(capsys.readouterr().out) == facts
    assert not list(kept.iterdir())


def test_what_is_undefined_is_null(tmp_path):
    facts = {"a": math.nan, "b": [1.5, (math.inf, {"c": -math.inf})], "d": "NaN", "e": 2}
    plain = {"a": None, "b": [1.5, [None, {"c": None}]], "d": "NaN", "e": 2}
    assert json.loads(document(facts, indent=1)) == plain
    assert json.loads(write_manifest(facts, tmp_path / "manifest.json").read_text()) == plain
    RunRecord("01", "ok", "key", parameters=facts).write(tmp_path)
    assert json.loads((tmp_path / "run.json").read_text())["parameters"] == plain


def test_what_goes_wrong_is_no_document(capsys):
    assert main(["reproduce", "--json"]) == 1
    assert capsys.readouterr() == ("", "jagged: --json: only with --dry-run\n")
    assert main(["reproduce", "--json", "--dry-run", "--preset", "huge"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)

"""Results of a notebook that ran on several devices."""

from __future__ import annotations

from pathlib import Path

from left_results import save_run
from made_up_results import MANIFEST, target_results

from jagged_ranking.figures import goals, headlines, redraw

NAME = "03_target_attention"


def save(folder: Path, device: str, notebook: str = NAME) -> None:
    save_run(folder, target_results(), {**MANIFEST, "id": notebook, "device": device})


def test_goals_are_judged_for_each_device(tmp_path: Path) -> None:
    save(tmp_path / NAME, "Imaginary GPU")
    save(tmp_path / f"{NAME}_other", "Other GPU")
    save(tmp_path / f"{NAME}_of_mine", "Strange GPU", notebook="03_target_attention_of_mine")
    block = goals.goal_tables(tmp_path).split("### Target attention: time")[1].split("###")[0]
    assert [line.split(" · ")[0] for line in block.splitlines() if line.startswith("*")] == [
        "*Imaginary GPU",
        "*Other GPU",
    ]
    assert block.count("| T3 | forward |") == 2


def test_headlines_are_those_of_the_folder_of_its_name(tmp_path: Path) -> None:
    save(tmp_path / NAME, "Imaginary GPU")
    alone = headlines.headlines(tmp_path)
    assert "Imaginary GPU" in alone
    save(tmp_path / f"{NAME}_other", "Other GPU")
    assert headlines.headlines(tmp_path) == alone
    assert "Other GPU" in redraw.all_results(tmp_path)

"""docs/data.md: its commands prepare the data sets that the committed results were made from."""

import json
import re
import shlex
from pathlib import Path

import pyarrow
import pytest
import yaml

from jagged_ranking.cli import main
from jagged_ranking.reproduce.synthetic_log import SOURCE

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
COMMANDS = {
    command.rpartition("data/")[2]: shlex.split(command)[1:]
    for command in re.findall(r"^jagged prepare .*$", PAGE, re.MULTILINE)
}
# A Parquet file names the release that wrote it.
PINNED = re.findall(r"^pyarrow==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
# Three million events take a third of a minute.
LARGE = {"globo_clicks"}


@pytest.fixture(scope="module")
def read() -> dict[str, str]:
    """The digests of the logs that the results of `04_quality` were made from; a run makes the
    made-up one itself."""
    manifest = json.loads((ROOT / "figures" / "04_quality" / "manifest.json").read_text("utf-8"))
    return {name: digest for name, digest in manifest["data_digests"].items() if name != SOURCE}


def test_every_data_set_of_the_presets_has_a_row_and_a_command(read: dict[str, str]) -> None:
    named: set[str] = set()
    for preset in ("small", "paper"):
        parameters = yaml.safe_load((ROOT / "notebooks" / "params" / f"{preset}.yaml").read_text())
        for notebook in ("04_quality", "06_history_length"):
            named.update(parameters[notebook].get("datasets", ()))
    assert named
    assert named | set(read) == set(COMMANDS)
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == set(COMMANDS)


@pytest.mark.skipif([pyarrow.__version__] != PINNED, reason=f"the digests want pyarrow {PINNED}")
@pytest.mark.parametrize("name", sorted(set(COMMANDS) - LARGE))
def test_its_command_prepares_what_was_read(
    name: str, read: dict[str, str], data_dir: Path, tmp_path: Path
) -> None:
    if not (data_dir / name).is_dir():
        pytest.skip(f"no {name} in {data_dir}")
    command = COMMANDS[name].copy()
    command[command.index("--from") + 1] = str(data_dir / name)
    command[command.index("--out") + 1] = str(tmp_path / name)
    assert main(command) == 0
    made = json.loads((tmp_path / name / "dataset.json").read_text("utf-8"))
    assert made["digest"] == read[name]

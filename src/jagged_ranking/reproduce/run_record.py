"""How a run of a notebook went: the file beside its results."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jagged_ranking.facts import document
from jagged_ranking.results import atomic

RECORD = "run.json"


@dataclass
class RunRecord:
    """How one run of a notebook went: `run.json` beside its results."""

    id: str
    status: str  # ok | failed
    key: str  # what the run depends on, see freshness.run_key
    parameters: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    started: str = ""  # UTC, ISO 8601
    seconds: float = 0.0  # of this part: since the run began, or went on
    earlier_seconds: float = 0.0  # of the parts before it, which did not come to their end
    error: str = ""  # where and what, one line
    drawing: str = ""  # what its figures were drawn by, see freshness.drawing_key

    @property
    def took(self) -> str:
        """How long, for people: of a run in parts, all of them and the last."""
        if not self.earlier_seconds:
            return f"{self.seconds:.0f} s"
        whole = self.seconds + self.earlier_seconds
        return f"{whole:.0f} s in parts, {self.seconds:.0f} s the last"

    def write(self, folder: Path) -> None:
        """Write the record into `folder`, whole or not at all."""
        with atomic(folder / RECORD) as temporary:
            temporary.write_text(document(asdict(self), indent=2) + "\n", encoding="utf-8")


def read_record(folder: Path) -> RunRecord | None:
    """The record of the last run into `folder`; None when there is none that can be read."""
    try:
        return RunRecord(**json.loads((folder / RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def earlier_seconds(folder: Path, key: str) -> float:
    """How long runs of this key into `folder` have taken that did not come to their end: what they
    had done is kept, and the next one goes on from there."""
    record = read_record(folder)
    if record is None or record.key != key or record.status == "ok":
        return 0.0
    return record.seconds + record.earlier_seconds

"""What the documents say of speed comes from committed results, and what they name is there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GENERATED = re.compile(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", re.DOTALL)
MEASURED = re.compile(r"\d[\d.,]*\s*(?:ms|us|µs|s|[KMGT]i?B|W|[MG]Hz|TFLOP/s|%|times)(?!\w)")


def _typed(page: str) -> str:
    """What of a page of docs/ was typed by hand."""
    text, blocks = GENERATED.subn("", (ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert blocks == 1
    return text


def test_no_measured_number_is_typed():
    assert MEASURED.findall(_typed("performance.md")) == []


def test_files_named_in_prose_are_there():
    for name in re.findall(r"`(\w+/[\w/]+(?:\.py)?)`", _typed("performance.md")):
        assert (ROOT / "kernels" / "jagged_kernels" / name).exists(), name

"""Reading a prepared dataset needs less than making one."""

import subprocess
import sys
from pathlib import Path

from click_data import prepare


def test_reading_needs_no_polars(tmp_path: Path) -> None:
    folder = prepare(
        "synthetic", out=tmp_path / "log", users=20, items=30, categories=5, events=400
    )
    code = (
        "import sys; sys.modules['polars'] = None\n"
        "from click_data import open_dataset\n"
        f"print(open_dataset({str(folder)!r}).num_users)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "20", result.stderr

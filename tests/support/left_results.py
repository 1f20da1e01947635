"""What a run leaves in a folder, and what a tool does: a result as a notebook's, though nobody runs
it by a preset."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from jagged_ranking import provenance, results


def save_run(folder: Path, table: pd.DataFrame, manifest: Mapping[str, Any]) -> Path:
    """The folder, with what a run leaves behind for figures and pages."""
    results.write(table, folder / results.RESULTS)
    provenance.write_manifest(manifest, folder / provenance.MANIFEST)
    return folder


def leave(
    folder: Path,
    table: pd.DataFrame,
    *,
    parameters: Mapping[str, Any],
    begun: provenance.Beginning,
) -> None:
    """Writes the table and its manifest, after the work.

    Args:
        folder: where figures and pages look for it.
        table: in the form of `results`.
        parameters: what decides the numbers.
        begun: from `provenance.begin`, before the work, by a name in the table of what code it
            depends on (`code_roots.ROOTS`).
    """
    manifest = provenance.manifest(preset="interactive", parameters=parameters, begun=begun)
    save_run(folder, table, manifest)

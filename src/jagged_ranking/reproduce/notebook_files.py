"""The stored notebooks: what there is, which one a name means, what one says."""

import hashlib
import json
from pathlib import Path

from jagged_ranking import paths
from jagged_ranking.reproduce.errors import RunError
from jagged_ranking.reproduce.parameters import read_cells


def notebook_ids(folder: Path) -> list[str]:
    """The ids of the notebooks in a folder, in order."""
    return sorted(path.stem for path in folder.glob("*.ipynb"))


def find_notebook(name: str) -> Path:
    """A notebook by path, by id (`01_speed`) or by the number or text its id begins with."""
    path = Path(name).expanduser()
    if path.suffix == ".ipynb":
        if not path.is_file():
            raise RunError(f"{name}: no such notebook")
        return path.resolve()
    folder = paths.NOTEBOOKS
    known = notebook_ids(folder)
    matches = [name] if name in known else [i for i in known if i.startswith(name)]
    if len(matches) != 1:
        which = "names more than one notebook" if matches else "is not a notebook"
        raise RunError(f"`{name}` {which}; there is {', '.join(known)}")
    return folder / f"{matches[0]}.ipynb"


def source_digest(notebook: Path) -> str:
    """sha256 over the cells' kinds, tags and sources: outputs and metadata do not count."""
    cells = read_cells(notebook)
    content = [[c.cell_type, c.metadata.get("tags", []), c.source] for c in cells]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()

"""Tables of ids in files beside a checkpoint, by torch.distributed.checkpoint.

Each rank writes the shards that it has, and any number of ranks, one too, read what they need of
them. Weights that all ranks hold alike stay in one file of rank 0, see `checkpoint`: to share these
out would make many small files of one, and gain nothing.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from jagged_ranking.first_line import first_line
from jagged_ranking.training.checkpoint import CheckpointError
from jagged_ranking.training.quiet import quiet
from jagged_ranking.training.ranks import Ranks
from jagged_ranking.training.run_progress import TrainingError

FOLDER = "tables-"  # and the step that they stand at
_METADATA = ".metadata"  # torch.distributed.checkpoint's, which is written last


class TableFiles:
    """The folders of a run's tables, below the run's folder.

    They are written before the checkpoint that names them: a run that is killed between the two
    finds the older folder, which the older checkpoint names, and comes to the newer again.
    """

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder, self.ranks = folder, ranks
        self._written = ""

    def save(self, step: int, state: dict[str, Any]) -> str:
        """The folder's name, of the tables behind so many steps. On all ranks at once."""
        name = f"{FOLDER}{step}"
        if name != self._written:
            path = self.folder / name
            writer = FileSystemWriter(path)
            alone = self.ranks.count == 1
            try:
                self.ranks.together(
                    lambda: _told(lambda: save(state, storage_writer=writer, no_dist=alone))
                )
            except _Failed as error:
                raise TrainingError(f"{path}: cannot be written ({error})") from error
            self._written = name
        return name

    def load(self, name: str, state: dict[str, Any]) -> None:
        """Reads into tensors, or the shards of them that this rank has. On all ranks at once."""
        self.ranks.together(
            lambda: load_tables(self.folder / name, state, alone=self.ranks.count == 1)
        )

    def keep(self, *names: str) -> None:
        """Deletes all others; of rank 0."""
        for path in self.folder.glob(f"{FOLDER}*"):
            if path.name not in names:
                shutil.rmtree(path, ignore_errors=True)


def load_tables(path: Path, state: dict[str, Any], *, alone: bool = True) -> None:
    """Reads tables that `TableFiles.save` wrote into those of `state`, in place.

    Raises CheckpointError, on all ranks, where a shard is missing, damaged or of another shape on
    one of them. Nothing in the files is executed.
    """
    if not (path / _METADATA).is_file():
        raise CheckpointError(f"{path}: no such tables, or not all of them")
    reader = _Reader(path)
    try:
        _told(lambda: load(state, storage_reader=reader, no_dist=alone), reader)
    except _Failed as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


class _Failed(Exception):
    """What a rank said of its shards, in one line."""


def _told(do: Callable[[], Any], reader: _Reader | None = None) -> None:
    """An error that torch.distributed.checkpoint gathered from all ranks is one line."""
    try:
        with quiet():
            do()
    except CheckpointException as error:
        rank, (reason, _) = min(error.failures.items())
        if reader is not None and reader.refusal is not None:
            # All ranks read the same metadata, and PyTorch 2.11 keeps to itself what was wrong.
            reason = reader.refusal
        raise _Failed(f"rank {rank}: {first_line(reason)}") from error


class _Reader(FileSystemReader):
    """Its own reads the metadata by `pickle`, which runs whatever the file says.

    Attributes:
        refusal: what was wrong with the metadata.
    """

    refusal: Exception | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            with (Path(self.path) / _METADATA).open("rb") as file:
                found = _Unpickler(file).load()
            if not isinstance(found, Metadata):
                raise ValueError("the metadata is none")
        except Exception as error:  # whatever a damaged pickle raises
            self.refusal = error
            raise
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _Unpickler(pickle.Unpickler):
    """For what torch.distributed.checkpoint says of tensors, and no more."""

    known: ClassVar = {
        "torch.distributed.checkpoint.metadata": (
            "Metadata",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        ),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch": ("Size", "float32", "float64"),
        "torch.serialization": ("_get_layout",),
        "pathlib": ("PosixPath",),
    }

    def find_class(self, module: str, name: str) -> Any:
        """What the metadata of a checkpoint is made of."""
        if name not in self.known.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")
        return super().find_class(module, name)

"""Reading a distributed checkpoint without running anything that a stranger may have put in it.

``torch.distributed.checkpoint`` reads tensors with ``weights_only=True``, but unpickles the index file ``.metadata``
without any restriction. Here the index may name nothing but what an index consists of.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from megatron_pp.training.errors import CheckpointError

_INDEX_CLASSES = {
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(
            f"the checkpoint's index names {module}.{name}, which no checkpoint of ours holds: it is not loaded"
        )


def load_index(file: IO[bytes]) -> Metadata:
    """Read an index.

    Raises:
        CheckpointError: it is damaged, or names anything but the parts of an index.
    """
    try:
        metadata = _IndexUnpickler(file).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise CheckpointError(f"the checkpoint's index is damaged ({error}); use another checkpoint") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError("the checkpoint's index is damaged; use another checkpoint")
    return metadata


class SafeFileSystemReader(FileSystemReader):
    """``FileSystemReader`` with a restricted index reader."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's index. Raises :class:`CheckpointError` as :func:`load_index` does."""
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = load_index(file)
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata

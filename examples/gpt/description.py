"""``description.json`` of a checkpoint: what is in it and where. Plain JSON with its own CRC-32, every field checked.

No field is the name of a file, so none can lead out of the checkpoint's folder.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from examples.gpt.errors import CheckpointError
from examples.gpt.files import read_text, write_atomically

DESCRIPTION = "description.json"
FORMAT = 2


@dataclass(frozen=True)
class SavedTensor:
    """Where the bytes of a tensor are: ``size`` from ``offset`` on in the file of ``rank``."""

    rank: int
    offset: int
    size: int
    dtype: str
    shape: list[int]
    crc32: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _check(name, value, {"dtype": str, "shape": list}.get(name, int))
        for size in self.shape:
            _check("a size in shape", size, int)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in the folder ``path``, as its description says.

    ``name`` is the folder's when it was written (a copy has another), ``step`` counts optimizer steps, ``layout`` is
    what a run must have in common with it, ``progress`` the run's own notes.
    """

    path: Path
    name: str
    step: int
    layout: dict[str, Any]
    progress: dict[str, Any]
    tensors: dict[str, SavedTensor]

    def note(self, name: str, *kinds: type) -> Any:
        """A value of ``progress``. Raises CheckpointError if it is none of ``kinds``."""
        value, place = self.progress.get(name), self.path / DESCRIPTION
        if type(value) not in kinds:
            raise CheckpointError(f"{place}: progress.{name} is {value!r:.60}; it must be a {kinds[0].__name__}")
        return value


def write_description(checkpoint: Checkpoint) -> None:
    """Write it into the checkpoint's folder. Raises OSError."""
    content = {"format": FORMAT, **{name: value for name, value in asdict(checkpoint).items() if name != "path"}}
    text = json.dumps({**content, "crc32": _crc32(content)}, indent=1)
    write_atomically(checkpoint.path / DESCRIPTION, text + "\n")


def read_description(folder: Path) -> Checkpoint:
    """The checkpoint in ``folder``. Raises CheckpointError: the description is missing, damaged, of another format."""
    try:
        return _checkpoint(folder, json.loads(read_text(folder / DESCRIPTION)))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / DESCRIPTION} cannot be used: {error}") from error


def _checkpoint(folder: Path, content: Any) -> Checkpoint:
    _check("the description", content, dict)
    found = content.pop("format", None)
    if type(found) is not int or found != FORMAT:
        raise ValueError(f"format is {found!r:.60}; this version reads {FORMAT}: begin a new run")
    if content.pop("crc32", None) != _crc32({"format": FORMAT, **content}):
        raise ValueError("it is damaged: its content does not have the CRC-32 that it names")
    kinds = {"name": str, "step": int, "layout": dict, "progress": dict, "tensors": dict}
    if unlike := content.keys() ^ kinds.keys():
        raise ValueError(f"fields {sorted(unlike)!s:.80} are missing or unknown; it must hold {', '.join(kinds)}")
    for name, kind in kinds.items():
        _check(name, content[name], kind)
    tensors = {}
    for name, entry in content.pop("tensors").items():
        try:
            tensors[name] = SavedTensor(**entry)
        except (TypeError, ValueError) as error:
            raise ValueError(f"tensor {name:.80}: {error}") from error
    return Checkpoint(folder, tensors=tensors, **content)


def _crc32(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _check(name: str, value: Any, kind: type) -> None:
    # Below 2**63: what the system takes as a size or an offset.
    if type(value) is not kind or (kind is int and not 0 <= int(value) < 2**63):
        legal = "whole number from 0" if kind is int else kind.__name__
        raise ValueError(f"{name} is {value!r:.60}; it must be a {legal}")

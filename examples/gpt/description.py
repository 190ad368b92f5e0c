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
_MOST = 2**63  # what the system takes as a size or an offset


@dataclass(frozen=True)
class SavedTensor:
    """Where the bytes of a tensor are.

    Attributes:
        rank: that has written them into its file.
        offset, size: of the bytes in it.
        dtype: torch's name for it, such as ``torch.float32``.
        shape: of the tensor.
        crc32: of the bytes.
    """

    rank: int
    offset: int
    size: int
    dtype: str
    shape: list[int]
    crc32: int

    def __post_init__(self) -> None:
        for name in ("rank", "offset", "size", "crc32"):
            _check_whole_number(name, getattr(self, name))
        _check_kind("dtype", self.dtype, str)
        _check_kind("shape", self.shape, list)
        for size in self.shape:
            _check_whole_number("a size in shape", size)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as its description says.

    Attributes:
        path: its folder.
        name: the folder's name when it was written; another one for a copy.
        step: optimizer steps done when it was written.
        layout: what a run must have in common with it to load it, JSON values by name.
        progress: the run's own notes, JSON values by name.
        tensors: by name.
    """

    path: Path
    name: str
    step: int
    layout: dict[str, Any]
    progress: dict[str, Any]
    tensors: dict[str, SavedTensor]

    def note(self, name: str, *kinds: type) -> Any:
        """A value of ``progress``. Raises CheckpointError if it is none of ``kinds``."""
        value = self.progress.get(name)
        if type(value) not in kinds:
            raise CheckpointError(
                f"{self.path / DESCRIPTION}: progress.{name} is {value!r:.60}; it must be a {kinds[0].__name__}"
            )
        return value


def write_description(checkpoint: Checkpoint) -> None:
    """Write it into the checkpoint's folder. Raises OSError."""
    content = {"format": FORMAT, **{name: value for name, value in asdict(checkpoint).items() if name != "path"}}
    text = json.dumps({**content, "crc32": _crc32(content)}, indent=1)
    write_atomically(checkpoint.path / DESCRIPTION, text + "\n")


def read_description(folder: Path) -> Checkpoint:
    """The checkpoint in ``folder``.

    Raises:
        CheckpointError: the description is missing, damaged, or of another format.
    """
    try:
        return _parse(folder, json.loads(read_text(folder / DESCRIPTION)))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / DESCRIPTION} cannot be used: {error}") from error


def _parse(folder: Path, content: Any) -> Checkpoint:
    _check_kind("the description", content, dict)
    found = content.pop("format", None)
    if type(found) is not int or found != FORMAT:
        raise ValueError(
            f"format is {found!r:.60}; this version reads {FORMAT}: continue with the version that wrote it, or anew"
        )
    if content.pop("crc32", None) != _crc32({"format": FORMAT, **content}):
        raise ValueError("it is damaged: its content does not have the CRC-32 that it names")
    names = {"name": str, "layout": dict, "progress": dict, "tensors": dict}
    if unlike := content.keys() ^ {"step", *names}:
        raise ValueError(f"fields {sorted(unlike)!s:.80} are missing or unknown; it must hold step, {', '.join(names)}")
    _check_whole_number("step", content["step"])
    for name, kind in names.items():
        _check_kind(name, content[name], kind)
    tensors = {name: _tensor(name, entry) for name, entry in content.pop("tensors").items()}
    return Checkpoint(folder, tensors=tensors, **content)


def _tensor(name: str, entry: Any) -> SavedTensor:
    try:
        return SavedTensor(**entry)
    except (TypeError, ValueError) as error:
        raise ValueError(f"tensor {name:.80}: {error}") from error


def _crc32(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _check_whole_number(name: str, value: Any) -> None:
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"{name} is {value!r:.60}; it must be a whole number from 0")


def _check_kind(name: str, value: Any, kind: type) -> None:
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r:.60}; it must be a {kind.__name__}")

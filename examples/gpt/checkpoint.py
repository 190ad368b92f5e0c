"""Checkpoints that are complete or absent, written by torch.distributed.checkpoint (DCP). Reading one executes no code
in it.

    <folder>/latest                            one line: the name of the newest checkpoint
    <folder>/step-00000100/description.json    contents and their places: JSON with its own CRC-32, every field checked
    <folder>/step-00000100/__0_0.distcp        tensors of rank 0, read with ``torch.load(weights_only=True)``
    <folder>/step-00000100/.metadata           DCP's own description, for torch's tools: a pickle, never read here

Tensors have their names in the whole model, so ranks may load other layers than they have saved. A checkpoint is
written under a hidden name. It gets its own name when all ranks have finished, and then ``latest`` is changed. If a
process is killed in between, ``latest`` still names a complete checkpoint. Several nodes need a shared folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.storage import WriteResult

from examples.gpt.errors import CheckpointError, CheckpointLayoutError, CheckpointWriteError, NoCheckpointError
from examples.gpt.files import open_plain, read_text, sync_folder, write_atomically
from examples.gpt.process import on_all_ranks, on_first_rank
from examples.gpt.sealed_tensor import largest_length, tensor_in

LATEST, DESCRIPTION, FORMAT = "latest", "description.json", 3
_NAME = re.compile(r"step-[0-9A-Za-z._-]{1,80}")
_TENSOR_FILE = re.compile(r"__\d+_\d+\.distcp")
_ADVICE = "give --resume an older checkpoint of the run, or begin a new one"

# The kinds of a description's values: a type, a list of one kind, fields by name, or any names (...) with one kind.
_TENSOR = {"relative_path": str, "offset": int, "length": int, "shape": [int]}
_CONTENT: dict[str, Any] = {"name": str, "step": int, "layout": dict, "progress": dict}
_CONTENT |= {"files": {...: int}, "tensors": {...: _TENSOR}}


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint in the folder ``path``, whose name was ``name`` when it was written."""

    path: Path
    name: str
    step: int  # optimizer steps done
    layout: dict[str, Any]  # sizes that a run must share to load it
    progress: dict[str, Any]  # values that the run has stored
    files: dict[str, int]  # file -> its CRC-32
    tensors: dict[str, dict[str, Any]]  # tensor -> its file, bytes in it, and shape


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at ``path``, which is its own folder, a folder of checkpoints, or a run's folder. Reads only JSON.
    Raises NoCheckpointError if there is none, CheckpointError if its description cannot be used."""
    for folder in (path, path / "checkpoints"):
        if os.path.lexists(folder / DESCRIPTION):
            return read_description(folder)
        if os.path.lexists(folder / LATEST):
            with suppress(OSError, ValueError):
                if _NAME.fullmatch(name := read_text(folder / LATEST).strip()):
                    return read_description(folder / name)
            raise CheckpointError(f"{folder / LATEST} names no checkpoint; {_ADVICE}")
    raise NoCheckpointError(f"there is no checkpoint at {path}; give a run's folder or one of its checkpoints/step-...")


def make_newest(path: Path) -> None:
    """Make the checkpoint at ``path`` the one from which the run continues when it starts again. Raises OSError."""
    write_atomically(path.parent / LATEST, path.name + "\n")


def check_layout(checkpoint: Checkpoint, layout: dict[str, Any]) -> None:
    """Raises CheckpointLayoutError for a checkpoint of another layout. The error names each value that differs."""
    there = checkpoint.layout
    names = [name for name in sorted(layout.keys() | there.keys()) if there.get(name) != layout.get(name)]
    if names:
        unlike = "; ".join(f"{name} is {there.get(name)} there and {layout.get(name)} here" for name in names)
        raise CheckpointLayoutError(f"{checkpoint.path} is of another model or step: {unlike}; give its values")


def write_description(checkpoint: Checkpoint) -> None:
    """Write the description into the checkpoint's folder. Raises OSError."""
    content = {"format": FORMAT, **{name: getattr(checkpoint, name) for name in _CONTENT}}
    text = json.dumps({**content, "crc32": _crc32(content)}, indent=1)
    write_atomically(checkpoint.path / DESCRIPTION, text + "\n")


def read_description(folder: Path) -> Checkpoint:
    """The checkpoint in ``folder``. Raises CheckpointError if its description is missing, damaged or of another
    format."""
    try:
        content = json.loads(read_text(folder / DESCRIPTION))
        _check("description", content, dict)
        found, crc32 = content.pop("format", None), content.pop("crc32", None)
        if type(found) is not int or found != FORMAT:
            raise ValueError(f"format is {found!r:.60}; this version reads {FORMAT}: begin a new run")
        if crc32 != _crc32({"format": FORMAT, **content}):
            raise ValueError("it is damaged: its content does not have the CRC-32 that it names")
        _check("description", content, _CONTENT)
        for name in content["files"]:
            if not _TENSOR_FILE.fullmatch(name):
                raise ValueError(f"{name!r:.80} is not a name of a tensor file")
        for name, place in content["tensors"].items():
            if place["relative_path"] not in content["files"]:
                raise ValueError(f"tensor {name:.80}: its file {place['relative_path']!r:.60} is not among files")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / DESCRIPTION} cannot be used: {error}; {_ADVICE}") from error
    return Checkpoint(folder, **content)


def _crc32(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _check(name: Any, value: Any, kind: Any) -> None:
    """Raises ValueError unless ``value`` is of this kind. _CONTENT has the kinds."""
    wanted: type[Any] = kind if isinstance(kind, type) else type(kind)
    # The system accepts sizes and offsets below 2**63.
    if type(value) is not wanted or (wanted is int and not 0 <= value < 2**63):
        legal = "whole number from 0" if wanted is int else wanted.__name__
        raise ValueError(f"{name} is {value!r:.60}; it must be a {legal}")
    if isinstance(kind, list):
        for item in value:
            _check(f"{name}[]", item, kind[0])
    elif isinstance(kind, dict):
        kinds = dict.fromkeys(value, kind[...]) if ... in kind else kind
        if unlike := value.keys() ^ kinds.keys():
            raise ValueError(f"{name}: {sorted(unlike)!s:.80} is missing or unknown; it must hold {', '.join(kinds)}")
        for part, of_part in kinds.items():
            _check(f"{name}.{part:.80}", value[part], of_part)


def load_tensors(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    """Fill this rank's ``tensors`` in place. They may differ from those that it has saved. Collective. Each file is
    compared with its CRC-32 before it is read. Raises CheckpointError on every rank."""

    def load() -> None:
        try:
            if missing := sorted(tensors.keys() - checkpoint.tensors.keys()):
                raise ValueError(f"there is no {missing[0]}")
            for file_name in {checkpoint.tensors[name]["relative_path"] for name in tensors}:
                if _crc32_of(path := checkpoint.path / file_name) != checkpoint.files[file_name]:
                    raise ValueError(f"{path} is damaged: it does not have the CRC-32 that it was saved with")
            for name, tensor in tensors.items():
                tensor.copy_(_saved_tensor(checkpoint, name, list(tensor.shape)))
        except Exception as error:  # torch may raise any error for bytes that are not a tensor
            said = str(error).partition("\n")[0]
            raise CheckpointError(f"checkpoint {checkpoint.path} cannot be loaded: {said}; {_ADVICE}") from error

    on_all_ranks(load)


def _saved_tensor(checkpoint: Checkpoint, name: str, shape: list[int]) -> Tensor:
    """The saved tensor. Raises ValueError unless it has ``shape``, and reads no more bytes than this shape needs."""
    place = checkpoint.tensors[name]
    if place["shape"] != shape:
        raise ValueError(f"{name} has shape {place['shape']} there and {shape} here")
    if place["length"] > largest_length(shape):
        raise ValueError(f"{name} of shape {shape} is said to have {place['length']} bytes")
    with open_plain(checkpoint.path / place["relative_path"]) as file:
        file.seek(place["offset"])
        saved = tensor_in(file.read(place["length"]))
    if list(saved.shape) != shape:
        raise ValueError(f"{name} has shape {list(saved.shape)} there and {shape} here")
    return saved


def _crc32_of(path: Path) -> int:
    crc32 = 0
    with open_plain(path) as file:
        while part := file.read(1 << 24):
            crc32 = zlib.crc32(part, crc32)
    return crc32


class _Writer(dcp.FileSystemWriter):
    """Records on rank 0, by name, where each tensor has been written."""

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        sizes: Any = metadata.state_dict_metadata
        self.tensors: dict[str, Any] = {}
        for written in (at for of_rank in results for at in of_rank):
            name = written.index.fqn
            place = {field: getattr(written.storage_data, field) for field in ("relative_path", "offset", "length")}
            self.tensors[name] = {**place, "shape": list(sizes[name].size)}


class CheckpointWriter:
    """Writes a run's checkpoints into ``folder``, and keeps the ``keep`` newest. It removes only its own
    checkpoints."""

    def __init__(self, folder: Path, keep: int, layout: dict[str, Any]) -> None:
        self.folder, self.keep, self.layout = folder, keep, layout

    def save(self, step: int, tensors: dict[str, Tensor], progress: dict[str, Any]) -> Path:
        """Write a checkpoint. Returns its folder. Collective. Raises CheckpointWriteError on every rank.

        Tensors of one name on several ranks must hold equal values (those of data-parallel replicas do)."""
        name = ""
        try:
            name = on_first_rank(lambda: self._begin(step))
            folder, mine = self._unfinished(name), f"__{dist.get_rank()}_*"
            writer = _Writer(folder)
            dcp.save(dict(tensors), storage_writer=writer)
            crc32 = on_all_ranks(lambda: {path.name: _crc32_of(path) for path in folder.glob(mine)})
            files = {file: value for of_rank in crc32 for file, value in of_rank.items()}
            notes = name, step, self.layout, progress, files
            on_first_rank(lambda: self._publish(Checkpoint(folder, *notes, writer.tensors)))
        except (OSError, dcp.CheckpointException) as error:
            if name and dist.get_rank() == 0:
                shutil.rmtree(self._unfinished(name), ignore_errors=True)
            failures = getattr(error, "failures", {0: (error, None)}).values()
            said = "; ".join(sorted({str(failure) for failure, _ in failures}))
            raise CheckpointWriteError(f"a checkpoint in {self.folder} cannot be written: {said}") from error
        return self.folder / name

    def _unfinished(self, name: str) -> Path:
        return self.folder / f".{name}.unfinished"

    def _begin(self, step: int) -> str:
        """Remove unfinished checkpoints, choose the new one's name, and make an empty folder for it. Returns the
        name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob(".step-*.unfinished"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
        name, repeat = f"step-{step:08d}", 1
        # A run that resumed from an earlier checkpoint reaches the same step again. The existing checkpoint is not
        # changed.
        while any(map(os.path.lexists, (self.folder / name, self._unfinished(name)))):
            repeat += 1
            name = f"step-{step:08d}-{repeat}"
        self._unfinished(name).mkdir()
        return name

    def _publish(self, checkpoint: Checkpoint) -> None:
        """Write the checkpoint's description, give it its name, and remove the oldest ones beyond ``keep``."""
        write_description(checkpoint)
        os.rename(checkpoint.path, self.folder / checkpoint.name)
        sync_folder(self.folder)
        make_newest(self.folder / checkpoint.name)  # before the former newest one may be removed
        ours = [found.path for found in self._ours() if found.name != checkpoint.name]
        for path in ours[max(self.keep, 1) - 1 :]:
            # Renamed first, so that an interrupted removal leaves no partial checkpoint under a valid name.
            doomed = self._unfinished(path.name)
            if not os.path.lexists(doomed):
                os.rename(path, doomed)
                shutil.rmtree(doomed)

    def _ours(self) -> Iterator[Checkpoint]:
        """The complete checkpoints in the folder, newest first. Links and copies are left out, because they are the
        user's. A copy has another name than its description."""
        files = [path / DESCRIPTION for path in self.folder.glob("step-*") if not path.is_symlink()]
        dated = [(file.stat().st_mtime_ns, file.parent) for file in files if file.is_file()]
        for _, path in sorted(dated, reverse=True):
            with suppress(CheckpointError):
                if (found := read_description(path)).name == path.name:
                    yield found

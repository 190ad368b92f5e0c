"""Checkpoints that are whole or not there. Nothing in them is unpickled or run.

    <folder>/latest                            one line: the name of the newest checkpoint
    <folder>/step-00000100/description.json    what is in it and where: JSON with its own CRC-32, every field checked
    <folder>/step-00000100/rank-00000.bin      the bytes of the tensors that this rank has written, end to end

A checkpoint is written under a hidden name and gets its own when all ranks have finished; ``latest`` moves after that.
Whatever is killed in between, ``latest`` names a whole checkpoint. No field of a description is the name of a file, so
none can lead out of the folder. Several nodes need a folder they share.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from examples.gpt.distributed import on_all_ranks
from examples.gpt.errors import CheckpointError, CheckpointLayoutError, CheckpointWriteError, NoCheckpointError
from examples.gpt.files import open_plain, read_text, sync_folder, write_atomically

LATEST, DESCRIPTION, FORMAT = "latest", "description.json", 2
_NAME = re.compile(r"step-[0-9A-Za-z._-]{1,80}")
_OUR_NAME = re.compile(r"step-\d{8,}(-\d+)?")
_UNFINISHED = re.compile(rf"\.{_OUR_NAME.pattern}\.unfinished")
_OUR_FILE = re.compile(rf"rank-\d{{5,}}\.bin|\.?{re.escape(DESCRIPTION)}(\.new)?")
_CONTENT = {"name": str, "step": int, "layout": dict, "progress": dict, "tensors": dict}
_TENSOR = {"rank": int, "offset": int, "size": int, "dtype": str, "shape": list, "crc32": int}


class SavedTensor(NamedTuple):
    """Where the bytes of a tensor are: ``size`` from ``offset`` on in the file of ``rank``."""

    rank: int
    offset: int
    size: int
    dtype: str
    shape: list[int]
    crc32: int


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


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at ``path``: its own folder, a folder of checkpoints, or a run's folder. Reads JSON only.

    Raises NoCheckpointError if there is none, CheckpointError if its description cannot be used.
    """
    for folder in (path, path / "checkpoints"):
        if os.path.lexists(folder / LATEST) and not os.path.lexists(folder / DESCRIPTION):
            name = newest_name(folder)
            if name is None:
                raise CheckpointError(f"{folder / LATEST} names no checkpoint; {_advice(folder)}")
            folder = folder / name
        elif not os.path.lexists(folder / DESCRIPTION):
            continue
        try:
            return read_description(folder)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {_advice(folder.parent)}") from error
    raise NoCheckpointError(f"there is no checkpoint at {path}; give a run's folder or one of its checkpoints/step-...")


def newest_name(folder: Path) -> str | None:
    """What ``latest`` in a folder of checkpoints names; ``None`` if there is none, or one that cannot be used."""
    try:
        name = read_text(folder / LATEST).strip()
    except (OSError, ValueError):
        return None
    return name if _NAME.fullmatch(name) else None


def check_layout(checkpoint: Checkpoint, layout: dict[str, Any]) -> None:
    """Raises CheckpointLayoutError, naming each value that differs, for a checkpoint of another layout."""
    there = checkpoint.layout
    names = [name for name in sorted(layout.keys() | there.keys()) if there.get(name) != layout.get(name)]
    if names:
        unlike = "; ".join(f"{name} is {there.get(name)} there and {layout.get(name)} here" for name in names)
        raise CheckpointLayoutError(f"{checkpoint.path} is of another layout: {unlike}; give its values")


def write_description(checkpoint: Checkpoint) -> None:
    """Write it into the checkpoint's folder. Raises OSError."""
    tensors = {name: saved._asdict() for name, saved in checkpoint.tensors.items()}
    content = {"format": FORMAT, **{name: getattr(checkpoint, name) for name in _CONTENT}, "tensors": tensors}
    text = json.dumps({**content, "crc32": _crc32(content)}, indent=1)
    write_atomically(checkpoint.path / DESCRIPTION, text + "\n")


def read_description(folder: Path) -> Checkpoint:
    """The checkpoint in ``folder``. Raises CheckpointError: the description is missing, damaged, of another format."""
    try:
        content = json.loads(read_text(folder / DESCRIPTION))
        _check("the description", content, dict)
        found, crc32 = content.pop("format", None), content.pop("crc32", None)
        if type(found) is not int or found != FORMAT:
            raise ValueError(f"format is {found!r:.60}; this version reads {FORMAT}: begin a new run")
        if crc32 != _crc32({"format": FORMAT, **content}):
            raise ValueError("it is damaged: its content does not have the CRC-32 that it names")
        _check_fields("", content, _CONTENT)
        for name, entry in content["tensors"].items():
            _check_fields(f"tensor {name:.80}: ", entry, _TENSOR)
            for size in entry["shape"]:
                _check(f"tensor {name:.80}: a size in shape", size, int)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / DESCRIPTION} cannot be used: {error}") from error
    tensors = {name: SavedTensor(**entry) for name, entry in content.pop("tensors").items()}
    return Checkpoint(folder, tensors=tensors, **content)


def _crc32(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _check_fields(where: str, content: Any, kinds: dict[str, type]) -> None:
    """Raises ValueError unless ``content`` is a dict of exactly these fields."""
    _check(f"{where}the entry", content, dict)
    if unlike := content.keys() ^ kinds.keys():
        legal = f"it must hold {', '.join(kinds)}"
        raise ValueError(f"{where}fields {sorted(unlike)!s:.80} are missing or unknown; {legal}")
    for name, kind in kinds.items():
        _check(f"{where}{name}", content[name], kind)


def _check(name: str, value: Any, kind: type[Any]) -> None:
    # Below 2**63: what the system takes as a size or an offset.
    if type(value) is not kind or (kind is int and not 0 <= value < 2**63):
        legal = "whole number from 0" if kind is int else kind.__name__
        raise ValueError(f"{name} is {value!r:.60}; it must be a {legal}")


def load_tensors(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    """Fill this rank's ``tensors`` in place. Collective. Raises CheckpointError on every rank."""

    def failed(said: str) -> CheckpointError:
        advice = _advice(checkpoint.path.parent)
        return CheckpointError(f"checkpoint {checkpoint.path} cannot be loaded: {said}; {advice}")

    on_all_ranks(lambda: read_tensors(checkpoint, tensors), failed)


def read_tensors(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    """Fill ``tensors`` in place, each after its bytes were found to be what was saved. Raises CheckpointError."""
    for name, tensor in tensors.items():
        saved = checkpoint.tensors.get(name)
        if saved is None:
            raise CheckpointError(f"it holds no tensor {name}")
        there, here = (saved.dtype, saved.shape, saved.size), (str(tensor.dtype), list(tensor.shape), tensor.nbytes)
        if there != here:
            raise CheckpointError(f"tensor {name} is (dtype, shape, bytes) {there!s:.120} there and {here} here")
        if data := _read_bytes(checkpoint.path, name, saved):
            tensor.copy_(torch.frombuffer(data, dtype=tensor.dtype).reshape(tensor.shape))


class CheckpointWriter:
    """Writes a run's checkpoints into ``folder``, keeps the ``keep`` newest, and removes nothing but its own."""

    def __init__(self, folder: Path, keep: int, layout: dict[str, Any]) -> None:
        self.folder, self.keep, self.layout = folder, keep, layout

    def save(self, step: int, tensors: dict[str, Tensor], progress: dict[str, Any]) -> Path:
        """Write a checkpoint; its folder. Collective. Raises CheckpointWriteError on every rank.

        Tensors of one name on several ranks must hold equal values (those of data-parallel replicas do).
        """
        rank = dist.get_rank()
        begun = self._on_all_ranks(lambda: (self._begin(step) if rank == 0 else "", list(tensors)))
        name, elsewhere = begun[0][0], {name for _, names in begun[:rank] for name in names}
        unfinished = self.folder / f".{name}.unfinished"
        own = {name: tensor for name, tensor in tensors.items() if name not in elsewhere}
        try:
            parts = self._on_all_ranks(lambda: _write_tensors(unfinished / f"rank-{rank:05d}.bin", rank, own))
            saved = {name: entry for part in parts for name, entry in part.items()}
            checkpoint = Checkpoint(unfinished, name, step, self.layout, progress, saved)
            self._on_all_ranks(lambda: self._publish(checkpoint) if rank == 0 else None)
        except BaseException:
            if rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return self.folder / name

    def _on_all_ranks(self, action: Callable[[], Any]) -> list[Any]:
        where = f"a checkpoint in {self.folder} cannot be written"
        return on_all_ranks(action, lambda said: CheckpointWriteError(f"{where}: {said}"))

    def _begin(self, step: int) -> str:
        """Make an empty folder to write to, and choose the name to publish it under."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if _UNFINISHED.fullmatch(path.name) and _holds_only_our_files(path):
                shutil.rmtree(path)
        name, repeat = f"step-{step:08d}", 1
        # A run resumed from an earlier checkpoint reaches the same step again; what is there stays whole.
        while any(os.path.lexists(self.folder / taken) for taken in (name, f".{name}.unfinished")):
            repeat += 1
            name = f"step-{step:08d}-{repeat}"
        (self.folder / f".{name}.unfinished").mkdir()
        return name

    def _publish(self, checkpoint: Checkpoint) -> None:
        write_description(checkpoint)
        sync_folder(checkpoint.path)
        os.rename(checkpoint.path, self.folder / checkpoint.name)
        sync_folder(self.folder)
        write_atomically(self.folder / LATEST, checkpoint.name + "\n")
        sync_folder(self.folder)  # before what it has named until now is removed
        others = [path for path in _by_age(self.folder) if path.name != checkpoint.name and _is_ours(path)]
        for path in others[max(self.keep, 1) - 1 :]:
            # Renamed first: a removal that is cut short leaves no half checkpoint under a valid name.
            doomed = path.with_name(f".{path.name}.unfinished")
            if not os.path.lexists(doomed):
                os.rename(path, doomed)
                shutil.rmtree(doomed)


def _write_tensors(path: Path, rank: int, tensors: dict[str, Tensor]) -> dict[str, SavedTensor]:
    entries: dict[str, SavedTensor] = {}
    with open(path, "xb") as file:
        for name, tensor in tensors.items():
            data = bytearray(tensor.nbytes)
            if data:
                torch.frombuffer(data, dtype=torch.uint8).copy_(tensor.detach().reshape(-1).view(torch.uint8))
            form = str(tensor.dtype), list(tensor.shape)
            entries[name] = SavedTensor(rank, file.tell(), len(data), *form, zlib.crc32(data))
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return entries


def _read_bytes(folder: Path, name: str, saved: SavedTensor) -> bytearray:
    """The bytes of a tensor. Raises CheckpointError, naming the file, if they are not what was saved."""
    path = folder / f"rank-{saved.rank:05d}.bin"
    try:
        with open_plain(path) as file:
            if os.fstat(file.fileno()).st_size < saved.offset + saved.size:
                raise CheckpointError(f"{path} is cut short: it ends before tensor {name} does")
            data = bytearray(saved.size)
            file.seek(saved.offset)
            file.readinto(data)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if zlib.crc32(data) != saved.crc32:
        raise CheckpointError(f"{path} is damaged: tensor {name} does not have the CRC-32 that it was saved with")
    return data


def _advice(folder: Path) -> str:
    """Which checkpoint of a folder to use instead of a damaged one. Reads them, newest first."""
    for path in _by_age(folder):
        try:
            for name, saved in read_description(path).tensors.items():
                _read_bytes(path, name, saved)
        except CheckpointError:
            continue
        return f"the newest whole checkpoint there is {path}: give that one"
    return f"there is no whole checkpoint in {folder}: begin a new run"


def _by_age(folder: Path) -> list[Path]:
    """The folders in ``folder`` that are named and filled as checkpoints are, newest first; links are none."""
    try:
        paths = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and not path.is_symlink()]
        dated = [((path / DESCRIPTION).stat().st_mtime_ns, path) for path in paths if (path / DESCRIPTION).is_file()]
    except OSError:  # another run is removing one
        return []
    return [path for _, path in sorted(dated, reverse=True)]


def _is_ours(path: Path) -> bool:
    """Whether it is a checkpoint that was written here under this name, and nothing was put into it since."""
    try:
        named = _OUR_NAME.fullmatch(path.name) is not None and read_description(path).name == path.name
    except CheckpointError:
        return False
    return named and _holds_only_our_files(path)


def _holds_only_our_files(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and all(_OUR_FILE.fullmatch(name) for name in os.listdir(path))

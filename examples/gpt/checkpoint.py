"""Checkpoints that are whole or not there.

    <folder>/latest                            one line: the name of the newest checkpoint
    <folder>/step-00000100/description.json    see description.py
    <folder>/step-00000100/rank-00000.bin      the bytes of the tensors that this rank has written, end to end

A checkpoint is written under another name and gets its own when all ranks have finished; ``latest`` moves after that.
Whatever is killed in between, ``latest`` names a whole checkpoint. Several nodes need a folder they share.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from examples.gpt.description import DESCRIPTION, Checkpoint, SavedTensor, read_description, write_description
from examples.gpt.distributed import on_all_ranks
from examples.gpt.errors import CheckpointError, CheckpointLayoutError, CheckpointWriteError, NoCheckpointError
from examples.gpt.files import open_plain, read_text, sync_folder, write_atomically

LATEST = "latest"
_NAME = re.compile(r"step-[0-9A-Za-z._-]{1,80}")
_OUR_NAME = re.compile(r"step-\d{8,}(-\d+)?")
_UNFINISHED = re.compile(rf"\.{_OUR_NAME.pattern}\.unfinished")
_OUR_FILE = re.compile(rf"rank-\d{{5,}}\.bin|\.?{re.escape(DESCRIPTION)}(\.new)?")


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


def load_tensors(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    """Fill this rank's ``tensors`` in place. Collective. Raises CheckpointError on every rank."""
    _, failures = on_all_ranks(lambda: read_tensors(checkpoint, tensors))
    if failures:
        advice, _ = on_all_ranks(lambda: _advice(checkpoint.path.parent) if dist.get_rank() == 0 else "")
        raise CheckpointError(f"checkpoint {checkpoint.path} cannot be loaded: {_joined(failures)}; {advice[0]}")


def read_tensors(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    """Fill ``tensors`` in place, each after its bytes were found to be what was saved. Raises CheckpointError."""
    for name, tensor in tensors.items():
        saved = checkpoint.tensors.get(name)
        if saved is None:
            raise CheckpointError(f"it holds no tensor {name}")
        there, here = (saved.dtype, saved.shape, saved.size), (str(tensor.dtype), list(tensor.shape), tensor.nbytes)
        if there != here:
            raise CheckpointError(f"tensor {name} is (dtype, shape, bytes) {there!s:.120} there and {here} here")
        if data := _read_bytes(checkpoint, name, saved):
            tensor.copy_(torch.frombuffer(data, dtype=tensor.dtype).reshape(tensor.shape))


class CheckpointWriter:
    """Writes a run's checkpoints into ``folder``, keeps the ``keep`` newest, and removes nothing but its own."""

    def __init__(self, folder: Path, keep: int, layout: dict[str, Any]) -> None:
        self.folder, self.keep, self.layout = folder, keep, layout

    def save(self, step: int, tensors: dict[str, Tensor], progress: dict[str, Any]) -> Path:
        """Write a checkpoint; its folder. Collective. Raises CheckpointWriteError on every rank.

        Tensors of one name on several ranks must hold equal values (those of data-parallel replicas do).
        """
        first = dist.get_rank() == 0
        name = self._on_all_ranks(lambda: self._begin(step) if first else "")[0]
        unfinished = self.folder / f".{name}.unfinished"
        try:
            names = self._on_all_ranks(lambda: list(tensors))
            parts = self._on_all_ranks(lambda: _write_tensors(unfinished, tensors, names))
            saved = {name: entry for part in parts for name, entry in part.items()}
            checkpoint = Checkpoint(unfinished, name, step, self.layout, progress, saved)
            self._on_all_ranks(lambda: self._publish(checkpoint) if first else None)
        except BaseException:
            if first:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return self.folder / name

    def _on_all_ranks(self, action: Callable[[], Any]) -> list[Any]:
        results, failures = on_all_ranks(action)
        if failures:
            raise CheckpointWriteError(f"a checkpoint in {self.folder} cannot be written: {_joined(failures)}")
        return results

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


def rng_tensors(rank: int, device: torch.device) -> dict[str, Tensor]:
    """The states of this rank's random generators, by name; for saving, and as the buffers for loading."""
    states = {f"rng.rank{rank}.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"rng.rank{rank}.cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_rng(states: dict[str, Tensor], rank: int, device: torch.device) -> None:
    """Put back what ``rng_tensors`` took."""
    torch.set_rng_state(states[f"rng.rank{rank}.cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[f"rng.rank{rank}.cuda"], device)


def _joined(failures: list[Exception]) -> str:
    return "; ".join(sorted({str(failure) for failure in failures}))


def _write_tensors(folder: Path, tensors: dict[str, Tensor], names: list[list[str]]) -> dict[str, SavedTensor]:
    """Write those of this rank's tensors that no rank before it has."""
    rank, offset = dist.get_rank(), 0
    elsewhere = {name for others in names[:rank] for name in others}
    entries: dict[str, SavedTensor] = {}
    with open(folder / f"rank-{rank:05d}.bin", "xb") as file:
        for name, tensor in ((name, tensor) for name, tensor in tensors.items() if name not in elsewhere):
            data = bytearray(tensor.nbytes)
            if data:
                torch.frombuffer(data, dtype=torch.uint8).copy_(tensor.detach().reshape(-1).view(torch.uint8))
            file.write(data)
            form = str(tensor.dtype), list(tensor.shape)
            entries[name] = SavedTensor(rank, offset, len(data), *form, zlib.crc32(data))
            offset += len(data)
        file.flush()
        os.fsync(file.fileno())
    return entries


def _read_bytes(checkpoint: Checkpoint, name: str, saved: SavedTensor) -> bytearray:
    """The bytes of a tensor. Raises CheckpointError, naming the file, if they are not what was saved."""
    path = checkpoint.path / f"rank-{saved.rank:05d}.bin"
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
            checkpoint = read_description(path)
            for name, saved in checkpoint.tensors.items():
                _read_bytes(checkpoint, name, saved)
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
    """Whether it is a checkpoint that was written here under this name, and nobody has put anything into it."""
    try:
        named = _OUR_NAME.fullmatch(path.name) is not None and read_description(path).name == path.name
    except CheckpointError:
        return False
    return named and _holds_only_our_files(path)


def _holds_only_our_files(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and all(_OUR_FILE.fullmatch(name) for name in os.listdir(path))

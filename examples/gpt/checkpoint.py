"""Checkpoints that are whole or not there, written by torch.distributed.checkpoint (DCP). Nothing in them is run.

    <folder>/latest                            one line: the name of the newest checkpoint
    <folder>/step-00000100/description.json    what is in it and where: JSON with its own CRC-32, every field checked
    <folder>/step-00000100/__0_0.distcp        tensors of rank 0, read with ``torch.load(weights_only=True)``
    <folder>/step-00000100/.metadata           DCP's own description, for torch's tools: a pickle, never read here

Tensors have the names of the whole model, so ranks that hold other layers than those that saved find theirs. A
checkpoint is written under a hidden name and gets its own when all ranks have finished; ``latest`` moves after that.
Whatever is killed in between, ``latest`` names a whole checkpoint. Several nodes need a folder they share.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata

from examples.gpt.distributed import on_all_ranks
from examples.gpt.errors import CheckpointError, CheckpointLayoutError, CheckpointWriteError, NoCheckpointError
from examples.gpt.files import open_plain, read_text, sync_folder, write_atomically

LATEST, DESCRIPTION, FORMAT = "latest", "description.json", 3
_NAME = re.compile(r"step-[0-9A-Za-z._-]{1,80}")
_OUR_NAME = re.compile(r"step-\d{8,}(-\d+)?")
_UNFINISHED = re.compile(rf"\.{_OUR_NAME.pattern}\.unfinished")
_TENSOR_FILE = re.compile(r"__\d+_\d+\.distcp")
_OUR_FILE = re.compile(rf"{_TENSOR_FILE.pattern}|\.metadata(\.tmp)?|\.?{re.escape(DESCRIPTION)}(\.new)?")
_CONTENT = {"name": str, "step": int, "layout": dict, "progress": dict, "files": dict, "tensors": dict}
_TENSOR = {"relative_path": str, "offset": int, "length": int, "shape": list}
_AT_ONCE = 1 << 24  # bytes


class SavedTensor(NamedTuple):
    """Where a tensor is: ``length`` bytes from ``offset`` on in a file. The names are those that DCP asks for."""

    relative_path: str
    offset: int
    length: int
    shape: list[int]

    @property
    def transform_descriptors(self) -> tuple[str, ...]:
        """Nothing is compressed."""
        return ()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in the folder ``path``, as its description says. ``name`` is the folder's when it was written (a
    copy has another), ``step`` counts optimizer steps, ``layout`` is what a run must have in common with it,
    ``progress`` the run's own notes, ``files`` the CRC-32 of each file."""

    path: Path
    name: str
    step: int
    layout: dict[str, Any]
    progress: dict[str, Any]
    files: dict[str, int]
    tensors: dict[str, SavedTensor]

    def note(self, name: str, *kinds: type) -> Any:
        """A value of ``progress``. Raises CheckpointError if it is none of ``kinds``."""
        value, place = self.progress.get(name), self.path / DESCRIPTION
        if type(value) not in kinds:
            raise CheckpointError(f"{place}: progress.{name} is {value!r:.60}; it must be a {kinds[0].__name__}")
        return value


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at ``path``: its own folder, a folder of checkpoints, or a run's folder. Reads JSON only. Raises
    NoCheckpointError if there is none, CheckpointError if its description cannot be used."""
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
        raise CheckpointLayoutError(f"{checkpoint.path} is of another model or step: {unlike}; give its values")


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
        for name, file_crc32 in content["files"].items():
            _check(f"the CRC-32 of {name:.80}", file_crc32, int)
            if not _TENSOR_FILE.fullmatch(name):
                raise ValueError(f"{name!r:.80} is no name of a file of tensors")
        for name, entry in content["tensors"].items():
            where = f"tensor {name:.80}: "
            _check_fields(where, entry, _TENSOR)
            for size in entry["shape"]:
                _check(f"{where}a size in shape", size, int)
            if entry["relative_path"] not in content["files"]:
                raise ValueError(f"{where}relative_path is {entry['relative_path']!r:.60}, which is none of files")
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
    """Fill this rank's ``tensors`` in place, which may be others than this rank has saved. Collective. Each file is
    compared with its CRC-32 first, by one of the ranks. Raises CheckpointError on every rank."""

    def failed(said: str) -> CheckpointError:
        advice = _advice(checkpoint.path.parent)
        return CheckpointError(f"checkpoint {checkpoint.path} cannot be loaded: {said}; {advice}")

    own = sorted(checkpoint.files)[dist.get_rank() :: dist.get_world_size()]
    on_all_ranks(lambda: check_files(checkpoint, own), failed)
    try:
        read_tensors(checkpoint, tensors)
    except CheckpointError as error:
        raise failed(str(error)) from error


def read_tensors(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    """``load_tensors`` without the comparison of the files; also outside of a process group."""
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    try:
        dcp.load(dict(tensors), storage_reader=_Reader(checkpoint), planner=planner)
    except dcp.CheckpointException as error:
        raise CheckpointError(_said(error)) from error


def check_files(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Raises CheckpointError unless the files ``names`` of the checkpoint are what was saved."""
    for path in (checkpoint.path / name for name in names):
        try:
            whole = _crc32_of(path) == checkpoint.files[path.name]
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not whole:
            raise CheckpointError(f"{path} is damaged: it does not have the CRC-32 that it was saved with")


class _Reader(dcp.FileSystemReader):
    """DCP's reader, with our description in the place of ``.metadata``."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.path)
        self.checkpoint = checkpoint

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp_metadata.Metadata:
        kinds, places = {}, {}
        for name, saved in self.checkpoint.tensors.items():
            size, origin = torch.Size(saved.shape), torch.Size([0] * len(saved.shape))
            whole = [dcp_metadata.ChunkStorageMetadata(origin, size)]
            kinds[name] = dcp_metadata.TensorStorageMetadata(dcp_metadata.TensorProperties(), size, whole)
            places[dcp_metadata.MetadataIndex(name, origin)] = saved
        return dcp_metadata.Metadata(kinds, storage_data=places)  # type: ignore[arg-type]


def _said(error: dcp.CheckpointException) -> str:
    """What ranks have said, each sentence once."""
    return "; ".join(sorted({str(failure) for failure, _ in error.failures.values()}))


class CheckpointWriter:
    """Writes a run's checkpoints into ``folder``, keeps the ``keep`` newest, and removes nothing but its own."""

    def __init__(self, folder: Path, keep: int, layout: dict[str, Any]) -> None:
        self.folder, self.keep, self.layout = folder, keep, layout

    def save(self, step: int, tensors: dict[str, Tensor], progress: dict[str, Any]) -> Path:
        """Write a checkpoint; its folder. Collective. Raises CheckpointWriteError on every rank.

        Tensors of one name on several ranks must hold equal values (those of data-parallel replicas do)."""
        rank = dist.get_rank()
        name = self._on_all_ranks(lambda: self._begin(step) if rank == 0 else "")[0]
        unfinished = self.folder / f".{name}.unfinished"
        try:
            try:
                metadata = dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(unfinished))
            except dcp.CheckpointException as error:
                raise self._failed(_said(error)) from error
            own = unfinished.glob(f"__{rank}_*.distcp")
            parts = self._on_all_ranks(lambda: {path.name: _crc32_of(path) for path in own})
            files = {name: crc32 for part in parts for name, crc32 in part.items()}
            checkpoint = Checkpoint(unfinished, name, step, self.layout, progress, files, _tensors_of(metadata))
            self._on_all_ranks(lambda: self._publish(checkpoint) if rank == 0 else None)
        except BaseException:
            if rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return self.folder / name

    def _failed(self, said: str) -> CheckpointWriteError:
        return CheckpointWriteError(f"a checkpoint in {self.folder} cannot be written: {said}")

    def _on_all_ranks(self, action: Callable[[], Any]) -> list[Any]:
        return on_all_ranks(action, self._failed)

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


def _tensors_of(metadata: Any) -> dict[str, SavedTensor]:
    """Where DCP has put each tensor."""
    sizes = {name: list(kind.size) for name, kind in metadata.state_dict_metadata.items()}
    places = {index.fqn: place for index, place in metadata.storage_data.items()}
    return {n: SavedTensor(at.relative_path, at.offset, at.length, sizes[n]) for n, at in places.items()}


def _crc32_of(path: Path) -> int:
    crc32 = 0
    with open_plain(path) as file:
        while part := file.read(_AT_ONCE):
            crc32 = zlib.crc32(part, crc32)
    return crc32


def _advice(folder: Path) -> str:
    """Which checkpoint of a folder to use instead of a damaged one. Reads them, newest first."""
    for path in _by_age(folder):
        try:
            checkpoint = read_description(path)
            check_files(checkpoint, checkpoint.files)
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

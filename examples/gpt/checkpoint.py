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
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.storage import WriteResult

from examples.gpt.errors import CheckpointError, CheckpointLayoutError, CheckpointWriteError, NoCheckpointError
from examples.gpt.files import open_plain, read_text, sync_folder, write_atomically

LATEST, DESCRIPTION, FORMAT = "latest", "description.json", 3
_NAME = re.compile(r"step-[0-9A-Za-z._-]{1,80}")
_TENSOR_FILE = re.compile(r"__\d+_\d+\.distcp")

# What a description holds: a type, a list of them, fields by name, or any names (...) for values of one kind.
_TENSOR = {"relative_path": str, "offset": int, "length": int, "shape": [int]}
_CONTENT: dict[str, Any] = {"name": str, "step": int, "layout": dict, "progress": dict}
_CONTENT |= {"files": {...: int}, "tensors": {...: _TENSOR}}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in the folder ``path``, as its description says. ``name`` is the folder's when it was written (a
    copy has another), ``step`` counts optimizer steps, ``layout`` is what a run must have in common with it,
    ``progress`` the run's own notes, ``files`` the CRC-32 of each file. A tensor is in the file ``relative_path``,
    ``length`` bytes from ``offset`` on."""

    path: Path
    name: str
    step: int
    layout: dict[str, Any]
    progress: dict[str, Any]
    files: dict[str, int]
    tensors: dict[str, dict[str, Any]]


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at ``path``: its own folder, a folder of checkpoints, or a run's folder. Reads JSON only. Raises
    NoCheckpointError if there is none, CheckpointError if its description cannot be used."""
    for folder in (path, path / "checkpoints"):
        is_one, has_some = (os.path.lexists(folder / name) for name in (DESCRIPTION, LATEST))
        try:
            if is_one or has_some:
                return read_description(folder if is_one else folder / _newest_name(folder))
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {_advice(folder.parent if is_one else folder)}") from error
    raise NoCheckpointError(f"there is no checkpoint at {path}; give a run's folder or one of its checkpoints/step-...")


def _newest_name(folder: Path) -> str:
    with suppress(OSError, ValueError):
        if _NAME.fullmatch(name := read_text(folder / LATEST).strip()):
            return name
    raise CheckpointError(f"{folder / LATEST} names no checkpoint")


def check_layout(checkpoint: Checkpoint, layout: dict[str, Any]) -> None:
    """Raises CheckpointLayoutError, naming each value that differs, for a checkpoint of another layout."""
    there = checkpoint.layout
    names = [name for name in sorted(layout.keys() | there.keys()) if there.get(name) != layout.get(name)]
    if names:
        unlike = "; ".join(f"{name} is {there.get(name)} there and {layout.get(name)} here" for name in names)
        raise CheckpointLayoutError(f"{checkpoint.path} is of another model or step: {unlike}; give its values")


def write_description(checkpoint: Checkpoint) -> None:
    """Write it into the checkpoint's folder. Raises OSError."""
    content = {"format": FORMAT, **{name: getattr(checkpoint, name) for name in _CONTENT}}
    text = json.dumps({**content, "crc32": _crc32(content)}, indent=1)
    write_atomically(checkpoint.path / DESCRIPTION, text + "\n")


def read_description(folder: Path) -> Checkpoint:
    """The checkpoint in ``folder``. Raises CheckpointError: the description is missing, damaged, of another format."""
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
                raise ValueError(f"{name!r:.80} is no name of a file of tensors")
        for name, place in content["tensors"].items():
            if place["relative_path"] not in content["files"]:
                raise ValueError(f"tensor {name:.80}: {place['relative_path']!r:.60} is none of files")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / DESCRIPTION} cannot be used: {error}") from error
    return Checkpoint(folder, **content)


def _crc32(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _check(name: Any, value: Any, kind: Any) -> None:
    """Raises ValueError unless ``value`` is of a kind as in _CONTENT."""
    wanted: type[Any] = kind if isinstance(kind, type) else type(kind)
    # Below 2**63: what the system takes as a size or an offset.
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
    """Fill this rank's ``tensors`` in place, which may be others than this rank has saved. Collective where there is a
    process group. Each file is compared with its CRC-32 before it is read. Raises CheckpointError on every rank."""
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    try:
        dcp.load(dict(tensors), storage_reader=_Reader(checkpoint), planner=planner)
    except dcp.CheckpointException as error:
        advice = _advice(checkpoint.path.parent)
        raise CheckpointError(f"checkpoint {checkpoint.path} cannot be loaded: {_said(error)}; {advice}") from error


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
        for name, place in self.checkpoint.tensors.items():
            size, origin = torch.Size(place["shape"]), torch.Size([0] * len(place["shape"]))
            whole = [dcp_metadata.ChunkStorageMetadata(origin, size)]
            kinds[name] = dcp_metadata.TensorStorageMetadata(dcp_metadata.TensorProperties(), size, whole)
            places[dcp_metadata.MetadataIndex(name, origin)] = SimpleNamespace(**place, transform_descriptors=())
        return dcp_metadata.Metadata(kinds, storage_data=places)  # type: ignore[arg-type]

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Any:
        check_files(self.checkpoint, {self.storage_data[item.storage_index].relative_path for item in plan.items})
        return super().read_data(plan, planner)


def _said(error: dcp.CheckpointException) -> str:
    """What ranks have said, each sentence once."""
    return "; ".join(sorted({str(failure) for failure, _ in error.failures.values()}))


@dataclass(frozen=True)
class _Written(WriteResult):
    crc32: int  # of the file


class CheckpointWriter(dcp.FileSystemWriter):
    """Writes a run's checkpoints into ``folder``, keeps the ``keep`` newest, and removes nothing but its own.

    DCP calls the methods below ``save``; an error of one rank it raises on all."""

    def __init__(self, folder: Path, keep: int, layout: dict[str, Any]) -> None:
        super().__init__(folder)
        self.folder, self.keep, self.layout = folder, keep, layout

    def save(self, step: int, tensors: dict[str, Tensor], progress: dict[str, Any]) -> Path:
        """Write a checkpoint; its folder. Collective. Raises CheckpointWriteError on every rank.

        Tensors of one name on several ranks must hold equal values (those of data-parallel replicas do)."""
        self.step, self.progress, self.name = step, progress, ""
        try:
            dcp.save(dict(tensors), storage_writer=self)
        except dcp.CheckpointException as error:
            if self.name and dist.get_rank() == 0:
                shutil.rmtree(self.path, ignore_errors=True)
            raise CheckpointWriteError(f"a checkpoint in {self.folder} cannot be written: {_said(error)}") from error
        return self.folder / self.name

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        return plan  # rank 0 makes the folder

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """On rank 0: make an empty folder to write to, and choose the name to publish it under."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob(".step-*.unfinished"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
        name, repeat = f"step-{self.step:08d}", 1
        # A run resumed from an earlier checkpoint reaches the same step again; what is there stays whole.
        while any(os.path.lexists(self.folder / taken) for taken in (name, f".{name}.unfinished")):
            repeat += 1
            name = f"step-{self.step:08d}-{repeat}"
        (self.folder / f".{name}.unfinished").mkdir()
        return [
            replace(plan, storage_data=SimpleNamespace(prefix=f"__{rank}_", name=name))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        self.name = plan.storage_data.name
        self.path = self.folder / f".{self.name}.unfinished"
        written = super().write_data(plan, planner).wait()
        crc32 = {name: _crc32_of(self.path / name) for name in {at.storage_data.relative_path for at in written}}
        results: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        results.set_result([_Written(**vars(at), crc32=crc32[at.storage_data.relative_path]) for at in written])
        return results

    def finish(self, metadata: dcp_metadata.Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: describe the checkpoint, give it its name, and remove those that are too many."""
        super().finish(metadata, results)
        files, tensors = {}, {}
        sizes: dict[str, Any] = metadata.state_dict_metadata
        written: Any
        for written in (at for of_rank in results for at in of_rank):
            place, name = written.storage_data, written.index.fqn
            files[place.relative_path] = written.crc32
            tensors[name] = {field: getattr(place, field) for field in ("relative_path", "offset", "length")}
            tensors[name]["shape"] = list(sizes[name].size)
        unfinished = Path(self.path)
        write_description(Checkpoint(unfinished, self.name, self.step, self.layout, self.progress, files, tensors))
        sync_folder(unfinished)
        os.rename(unfinished, self.folder / self.name)
        sync_folder(self.folder)
        write_atomically(self.folder / LATEST, self.name + "\n")
        sync_folder(self.folder)  # before what it has named until now is removed
        # Copies have other names than their descriptions, and are the user's.
        ours = [found.path for found in _described(self.folder) if found.name == found.path.name != self.name]
        for path in ours[max(self.keep, 1) - 1 :]:
            # Renamed first: a removal that is cut short leaves no half checkpoint under a valid name.
            doomed = path.with_name(f".{path.name}.unfinished")
            if not os.path.lexists(doomed):
                os.rename(path, doomed)
                shutil.rmtree(doomed)


def _crc32_of(path: Path) -> int:
    crc32 = 0
    with open_plain(path) as file:
        while part := file.read(1 << 24):
            crc32 = zlib.crc32(part, crc32)
    return crc32


def _advice(folder: Path) -> str:
    """Which checkpoint of a folder to use instead of a damaged one."""
    for checkpoint in _described(folder):
        with suppress(CheckpointError):
            check_files(checkpoint, checkpoint.files)
            return f"the newest whole checkpoint there is {checkpoint.path}: give that one"
    return f"there is no whole checkpoint in {folder}: begin a new run"


def _described(folder: Path) -> Iterator[Checkpoint]:
    """The checkpoints in ``folder`` whose descriptions can be used, newest first; links are none."""
    try:
        files = [path / DESCRIPTION for path in folder.glob("step-*") if not path.is_symlink()]
        dated = sorted(((file.stat().st_mtime_ns, file.parent) for file in files if file.is_file()), reverse=True)
    except OSError:  # another run is removing one
        return
    for _, path in dated:
        with suppress(CheckpointError):
            yield read_description(path)

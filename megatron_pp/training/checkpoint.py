"""Checkpoints that are whole or not there.

    <folder>/latest                 one line: the name of the newest checkpoint
    <folder>/step-00000100/         .metadata and *.distcp of torch.distributed.checkpoint, and description.json

A checkpoint is written under another name and gets its own only when all ranks have finished; ``latest`` moves after
that. Whatever is killed in between, ``latest`` names a whole checkpoint. Several nodes need a folder they share.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megatron_pp.training.errors import CheckpointError, CheckpointLayoutError, CheckpointWriteError
from megatron_pp.training.safe_reader import SafeFileSystemReader

DESCRIPTION = "description.json"
LATEST = "latest"
_UNFINISHED = ".unfinished"
FORMAT = 1
_NAME = re.compile(r"step-[0-9A-Za-z._-]{1,80}")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk.

    Attributes:
        path: its folder.
        step: optimizer steps done when it was written.
        layout: what a run must have in common with it to load it, JSON values by name.
        progress: the run's own notes, JSON values by name.
    """

    path: Path
    step: int
    layout: dict[str, Any]
    progress: dict[str, Any]


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at ``path``: its own folder, a folder of checkpoints, or a run's folder. Reads JSON only.

    Raises:
        CheckpointError: there is none, or its description cannot be read.
    """
    for folder in (path, path / "checkpoints"):
        if (folder / DESCRIPTION).is_file():
            return _read_description(folder)
        if (name := newest_name(folder)) is not None:
            return _read_description(folder / name)
    raise CheckpointError(
        f"there is no checkpoint at {path}; give a run's folder, or one of its checkpoints/step-... folders"
    )


def newest_name(folder: Path) -> str | None:
    """Name of the newest whole checkpoint in a folder of checkpoints; ``None`` if there is none.

    Raises:
        CheckpointError: ``latest`` holds no name of a checkpoint.
    """
    try:
        name = (folder / LATEST).read_text(errors="replace").strip()
    except OSError:
        return None
    if not _NAME.fullmatch(name):
        raise CheckpointError(f"{folder / LATEST} is damaged; give one of the step-... folders beside it")
    return name


def check_layout(checkpoint: Checkpoint, layout: dict[str, Any]) -> None:
    """Refuse a checkpoint of another layout.

    Raises:
        CheckpointLayoutError: naming each value that differs.
    """
    differences = [
        f"{name} is {checkpoint.layout.get(name)} there and {layout.get(name)} here"
        for name in sorted(layout.keys() | checkpoint.layout.keys())
        if checkpoint.layout.get(name) != layout.get(name)
    ]
    if differences:
        raise CheckpointLayoutError(
            f"checkpoint {checkpoint.path} is of another layout: {'; '.join(differences)}; "
            "give the values it was saved with"
        )


def load_tensors(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    """Fill ``tensors`` in place from a checkpoint. Collective: every rank calls it with its own names.

    Raises:
        CheckpointError: a tensor is missing or the files are damaged; on every rank.
    """
    try:
        dcp.load(tensors, storage_reader=SafeFileSystemReader(checkpoint.path))
    except dcp.CheckpointException as error:
        causes = "; ".join(sorted({str(failure) for failure, _ in error.failures.values()}))
        raise CheckpointError(f"checkpoint {checkpoint.path} cannot be loaded: {causes}; use another one") from error


class CheckpointWriter:
    """Writes a run's checkpoints into ``folder`` and removes old ones.

    Args:
        folder: made on the first save.
        keep: how many of the newest checkpoints to keep, at least 1.
        layout: see :class:`Checkpoint`.
    """

    def __init__(self, folder: Path, keep: int, layout: dict[str, Any]) -> None:
        self.folder = folder
        self.keep = keep
        self.layout = layout

    def save(self, step: int, tensors: dict[str, Tensor], progress: dict[str, Any]) -> Path:
        """Write a checkpoint. Collective: every rank of the default group calls it with its own tensors.

        Args:
            step: optimizer steps done.
            tensors: equal names on several ranks must hold equal values (data-parallel replicas do).
            progress: see :class:`Checkpoint`.

        Returns:
            The checkpoint's folder, the same on every rank.

        Raises:
            CheckpointWriteError: on every rank.
        """
        unfinished, final = self._names(step)
        self._on_first_rank(lambda: self._prepare(unfinished))
        try:
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(unfinished))
        except dcp.CheckpointException as error:
            causes = "; ".join(sorted({str(failure) for failure, _ in error.failures.values()}))
            raise CheckpointWriteError(f"checkpoint {final} cannot be written: {causes}") from error
        description = {"format": FORMAT, "step": step, "layout": self.layout, "progress": progress}
        self._on_first_rank(lambda: self._publish(unfinished, final, description))
        return final

    def _names(self, step: int) -> tuple[Path, Path]:
        """Folders to write and to publish, chosen by rank 0 so that all ranks agree."""
        name = f"step-{step:08d}"
        if dist.get_rank() == 0:
            repeat = 1
            # A run resumed from an earlier checkpoint comes by the same step again; what is there stays whole.
            while (self.folder / name).exists():
                repeat += 1
                name = f"step-{step:08d}-{repeat}"
        names: list[Any] = [name]
        dist.broadcast_object_list(names, src=0)
        return self.folder / f".{names[0]}{_UNFINISHED}", self.folder / names[0]

    def _on_first_rank(self, action: Any) -> None:
        """Run ``action`` on rank 0; every rank leaves together, and with the same error if it failed."""
        failure: list[str | None] = [None]
        if dist.get_rank() == 0:
            try:
                action()
            except OSError as error:
                failure[0] = str(error)
        dist.broadcast_object_list(failure, src=0)
        if failure[0] is not None:
            raise CheckpointWriteError(f"a checkpoint in {self.folder} cannot be written: {failure[0]}")

    def _prepare(self, unfinished: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(f".*{_UNFINISHED}"):
            shutil.rmtree(leftover)
        unfinished.mkdir()

    def _publish(self, unfinished: Path, final: Path, description: dict[str, Any]) -> None:
        write_atomically(unfinished / DESCRIPTION, json.dumps(description, indent=1) + "\n")
        _sync_folder(unfinished)
        os.rename(unfinished, final)
        _sync_folder(self.folder)
        write_atomically(self.folder / LATEST, final.name + "\n")
        # Nothing that it has named before is removed until the disk has it.
        _sync_folder(self.folder)
        self._remove_old(final)

    def _remove_old(self, newest: Path) -> None:
        others = [path for path in self.folder.glob("step-*") if path != newest]
        by_age = sorted(others, key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in by_age[max(self.keep, 1) - 1 :]:
            # Out of sight first: a removal that is cut short leaves no half checkpoint under a valid name.
            doomed = path.with_name(f".{path.name}{_UNFINISHED}")
            os.rename(path, doomed)
            shutil.rmtree(doomed)


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a reader, or a crash, sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.new")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def rng_tensors(rank: int, device: torch.device) -> dict[str, Tensor]:
    """The states of this rank's random generators, by name; for saving, and as the buffers for loading."""
    states = {f"rng.rank{rank}.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"rng.rank{rank}.cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_rng(states: dict[str, Tensor], rank: int, device: torch.device) -> None:
    """Put back what :func:`rng_tensors` took."""
    torch.set_rng_state(states[f"rng.rank{rank}.cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[f"rng.rank{rank}.cuda"], device)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_description(folder: Path) -> Checkpoint:
    file = folder / DESCRIPTION
    try:
        content = json.loads(file.read_text())
        if content["format"] != FORMAT:
            raise CheckpointError(f"checkpoint {folder} has format {content['format']}; this version reads {FORMAT}")
        return Checkpoint(folder, int(content["step"]), dict(content["layout"]), dict(content["progress"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read ({error!r}); use another checkpoint") from error

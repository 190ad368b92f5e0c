"""Sends what the last stage of a V logs to the last rank, where Megatron's training loop reads and prints it: the
reports of the loss function, and the trackers that add up losses during a step.

In a V the last stage is on rank 0. In a loop it is on the last rank, and its trackers need no transfer.
"""

import io
import pickle
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp.errors import ScheduleInputError

# Megatron's own tracker: the module, and the class whose `tracker` adds up losses of the last stage only. Megatron sums
# the trackers of auxiliary losses of experts and of sparse attention over the pipeline.
_MEGATRONS = (("megatron.core.transformer.multi_token_prediction", "MTPLossLoggingHelper"),)

# Trackers by name. Global, because programs log from anywhere.
_TRACKERS: dict[str, dict[str, Any]] = {}


def log_on_last_rank(name: str, tracker: dict[str, Any]) -> None:
    """Move the content of ``tracker`` to the last rank of the pipeline after each step whose stages are in a V.
    ``tracker`` is a dict in which your model or loss function logs on the last stage. Call this on all ranks, with the
    same ``name``.

    Values are added to those on the last rank: tensors of one shape and numbers are summed, lists are joined. Any other
    value replaces the old one. The dict may hold tensors, process groups of `parallel_state`, and objects that can be
    pickled.
    """
    _TRACKERS[name] = tracker


def hand_over(reports: list[Any], group: Any, source: int, target: int, device: torch.device) -> None:
    """Copy ``reports`` of rank ``source`` of ``group`` into the list of rank ``target``, and move the content of the
    trackers there. Tensors go from device to device.

    Both ranks call it with their own list. ``target`` waits for the device; ``source`` does not. A value that cannot be
    sent raises ScheduleInputError on both.
    """
    peers = [dist.get_global_rank(group, rank) for rank in (source, target)]
    if group.rank() == source:
        trackers = {name: tracker for name, tracker in _trackers().items() if tracker}
        content, tensors = _packed((reports, trackers))
        shapes = [(tensor.dtype, tensor.shape) for tensor in tensors]
        dist.send_object_list([(content, shapes)], dst=peers[1], group=group, device=device)
        _check(content)
        for dtype in _dtypes(shapes):
            alike = [tensor.to(device).reshape(-1) for tensor in tensors if tensor.dtype == dtype]
            dist.send(torch.cat(alike), dst=peers[1], group=group)
        for tracker in trackers.values():
            tracker.clear()
    elif group.rank() == target:
        received: list[Any] = [None]
        dist.recv_object_list(received, src=peers[0], group=group, device=device)
        content, shapes = received[0]
        _check(content)
        tensors = [torch.empty(shape, dtype=dtype, device=device) for dtype, shape in shapes]
        for dtype in _dtypes(shapes):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            message = torch.empty(sum(tensor.numel() for tensor in alike), dtype=dtype, device=device)
            dist.recv(message, src=peers[0], group=group)
            for tensor, part in zip(alike, message.split([tensor.numel() for tensor in alike]), strict=True):
                tensor.copy_(part.view(tensor.shape))
        reports[:], logged = _Unpickler(io.BytesIO(content), tensors).load()
        for name, values in logged.items():
            _add(_tracker(name), values)


def _trackers() -> dict[str, dict[str, Any]]:
    found = dict(_TRACKERS)
    for module, name in _MEGATRONS:
        helper = getattr(sys.modules.get(module), name, None)
        tracker = getattr(helper, "tracker", None)
        if isinstance(tracker, dict):
            found[f"{module}.{name}"] = tracker
    return found


def _tracker(name: str) -> dict[str, Any]:
    found = _trackers().get(name)
    if found is None:
        raise ScheduleInputError(
            f"the value logged as {name!r} comes from the rank of the last stage and is not known on this rank: call "
            f"log_on_last_rank({name!r}, ...) on all ranks"
        )
    return found


def _add(tracker: dict[str, Any], values: dict[str, Any]) -> None:
    """Log ``values`` in ``tracker``."""
    for name, value in values.items():
        before = tracker.get(name)
        if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor) and before.shape == value.shape:
            before += value.to(before.device)
        elif before is not None and type(before) is type(value) and _adds_up(value):
            tracker[name] = before + value
        else:
            tracker[name] = value


def _adds_up(value: Any) -> bool:
    return isinstance(value, (int, float, list)) and not isinstance(value, bool)


def _packed(given: Any) -> tuple[bytes | str, list[torch.Tensor]]:
    """``given`` as bytes without its tensors, and the tensors. Gives a reason, not bytes, if it cannot be pickled."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(given)
    except Exception as error:  # a user's object may raise anything
        return (
            "what the loss function reports, or the last stage logs, must go to the last rank of the pipeline, and "
            f"cannot be pickled ({type(error).__name__}: {error}); report tensors, numbers, text, and lists and dicts "
            "of these"
        ), []
    return file.getvalue(), pickler.tensors


def _check(content: bytes | str) -> None:
    if isinstance(content, str):
        raise ScheduleInputError(content)


class _Pickler(pickle.Pickler):
    """Pickles all but dense tensors, which it collects in ``tensors``, and process groups, which it names."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> int | str | None:
        if isinstance(obj, dist.ProcessGroup):
            return _name_of(obj)
        if not isinstance(obj, torch.Tensor) or obj.layout is not torch.strided:  # a sparse tensor's parts are dense
            return None
        self.tensors.append(obj.detach())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Reads the tensors from ``tensors``, and gives this rank's process group for each name."""

    def __init__(self, file: Any, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, pid: int | str) -> Any:
        return self.tensors[pid] if isinstance(pid, int) else _groups()[pid]


def _name_of(group: dist.ProcessGroup) -> str:
    for name, found in _groups().items():
        if found is group:
            return name
    raise pickle.PicklingError("a process group that megatron.core.parallel_state does not have")


def _groups() -> dict[str, Any]:
    """The groups of `parallel_state` by its names for them; each rank has its own group under a name."""
    state = vars(sys.modules["megatron.core.parallel_state"])
    return {name: value for name, value in state.items() if isinstance(value, dist.ProcessGroup)}


def _dtypes(shapes: Sequence[tuple[torch.dtype, torch.Size]]) -> list[torch.dtype]:
    """Each dtype once, in order of appearance, because the tensors of a dtype go as one message."""
    return list(dict.fromkeys(dtype for dtype, _ in shapes))

"""What is different in a step of Megatron-core's when its stages are placed in a V: the first and the last stage share
rank 0, where Megatron's loop and finalisation look for the last stage on rank P - 1.
"""

import importlib
import io
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp.common.module_attributes import unwrapped, wrapped_attribute
from megatron_pp.errors import ScheduleInputError
from megatron_pp.integrations.megatron_steps import MegatronSteps
from megatron_pp.integrations.v_placement import ChunkPlace, is_mirrored, shared_weight
from megatron_pp.plan.ir.placement import V_SHAPE
from megatron_pp.runtime.compute import Activation


class StepsInV:
    """``steps`` whose forwards ask Megatron for their data as seen from the stage that the chunk holds."""

    def __init__(self, steps: MegatronSteps, parallel_state: ModuleType) -> None:
        self.steps = steps
        self.places = [ChunkPlace(parallel_state, chunk) for chunk in range(len(steps.inputs.chunks))]
        self.record = steps.record
        self.backward = steps.backward
        self.backward_root = steps.backward_root

    def forward(self, chunk: int, mb: int, input_tensor: Activation) -> Activation:
        with self.places[chunk]:
            return self.steps.forward(chunk, mb, input_tensor)


def check_chunks(schedule: str, placement: str, chunks: Sequence[Any]) -> None:
    """Raises ScheduleInputError for model chunks that were built for another placement than the schedule's."""
    built = len(chunks) > 1 and is_mirrored(wrapped_attribute(chunks[1], "pg_collection"))
    if placement == V_SHAPE and not built:
        raise ScheduleInputError(
            f"config.pipeline_schedule {schedule!r} places stages in a v, and model chunk 1 was built for a loop; call "
            "install() and name the schedule before GPTModel is built (other models: 'V placement' in docs/megatron.md)"
        )
    if placement != V_SHAPE and built:
        raise ScheduleInputError(
            f"model chunk 1 was built for stages in a v, and config.pipeline_schedule {schedule!r} places them in a "
            f"{placement}; build the model for this schedule"
        )


@contextmanager
def shared_gradients_summed() -> Iterator[None]:
    """For the length of Megatron's `finalize_model_grads`: where it all-reduces the gradients of the embedding between
    the first and the last rank, those of the two stages on one rank are added.
    """
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    original = module._allreduce_word_embedding_grads
    module._allreduce_word_embedding_grads = _sum_shared_gradients  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module._allreduce_word_embedding_grads = original  # type: ignore[attr-defined]


def _sum_shared_gradients(model: Sequence[Any], *args: Any, **kwargs: Any) -> None:
    first, last = unwrapped(model[0]), unwrapped(model[-1])
    if not (first.pre_process and last.post_process) or shared_weight(last) is None:
        return
    if getattr(model[0].ddp_config, "use_megatron_fsdp", False):
        raise ScheduleInputError("V placement with tied embeddings does not take Megatron-FSDP; untie them or use DDP")
    ours, theirs = _gradient(shared_weight(first)), _gradient(shared_weight(last))
    if ours is not None and theirs is not None:  # None: the embedding is frozen
        ours.add_(theirs)
        theirs.copy_(ours)


def _gradient(weight: Any) -> torch.Tensor | None:
    return getattr(weight, "main_grad", weight.grad)


class _Pickler(pickle.Pickler):
    """Puts dense tensors aside, into ``tensors``."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor) or obj.layout is not torch.strided:  # whose dense parts follow
            return None
        self.tensors.append(obj.detach())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Takes the tensors that were put aside from ``tensors``."""

    def __init__(self, file: Any, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self.tensors[pid]


def hand_over(reports: list[Any], group: Any, source: int, target: int, device: torch.device) -> None:
    """Copy ``reports`` of the rank ``source`` of ``group`` into the list of ``target``, tensors from device to device.

    Called by both with their own list. ``target`` waits for the device; ``source`` does not.
    """
    peers = [dist.get_global_rank(group, rank) for rank in (source, target)]
    if group.rank() == source:
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(reports)
        shapes = [(tensor.dtype, tensor.shape) for tensor in pickler.tensors]
        dist.send_object_list([(file.getvalue(), shapes)], dst=peers[1], group=group, device=device)
        for dtype in _dtypes(shapes):
            alike = [tensor.to(device).reshape(-1) for tensor in pickler.tensors if tensor.dtype == dtype]
            dist.send(torch.cat(alike), dst=peers[1], group=group)
    elif group.rank() == target:
        received: list[Any] = [None]
        dist.recv_object_list(received, src=peers[0], group=group, device=device)
        content, shapes = received[0]
        tensors = [torch.empty(shape, dtype=dtype, device=device) for dtype, shape in shapes]
        for dtype in _dtypes(shapes):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            message = torch.empty(sum(tensor.numel() for tensor in alike), dtype=dtype, device=device)
            dist.recv(message, src=peers[0], group=group)
            for tensor, part in zip(alike, message.split([tensor.numel() for tensor in alike]), strict=True):
                tensor.copy_(part.view(tensor.shape))
        reports[:] = _Unpickler(io.BytesIO(content), tensors).load()


def _dtypes(shapes: Sequence[tuple[torch.dtype, torch.Size]]) -> list[torch.dtype]:
    """Each dtype once, in order of appearance: one message each."""
    return list(dict.fromkeys(dtype for dtype, _ in shapes))

"""The differences of a step of Megatron-core's whose stages are placed in a V: the first and the last stage are on rank
0, and Megatron's loop and finalisation expect the last stage on rank P - 1.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.common.module_attributes import unwrapped, wrapped_attribute
from megatron_pp.errors import ScheduleInputError
from megatron_pp.integrations.megatron.steps import attention_residuals, v_logs
from megatron_pp.integrations.megatron.steps.forward_backward import MegatronSteps
from megatron_pp.integrations.megatron.steps.known_steps import KnownSteps
from megatron_pp.integrations.megatron.steps.served.scope import has_attention_residuals
from megatron_pp.integrations.megatron.steps.v_placement import ChunkPlace, is_mirrored, shared_weight
from megatron_pp.plan.ir.placement import V_SHAPE
from megatron_pp.runtime.engine.compute import Activation

LAST_STAGE = 0  # the rank that holds it


class StepsInV:
    """Runs ``steps``. In a forward Megatron's functions answer for the chunk's stage, so it reads the right data."""

    def __init__(self, steps: KnownSteps | MegatronSteps, parallel_state: ModuleType) -> None:
        self.steps = steps
        self.places = [ChunkPlace(parallel_state, chunk) for chunk in range(len(steps.inputs.chunks))]
        self.record = steps.record
        self.backward = steps.backward
        self.backward_root = steps.backward_root

    def forward(self, chunk: int, mb: int, input_tensor: Activation) -> Activation:
        with self.places[chunk]:
            return self.steps.forward(chunk, mb, input_tensor)


def check_step(schedule: str, placement: str, config: Any, chunks: Sequence[Any]) -> None:
    """Raises ScheduleInputError for a model that ``schedule``, which places its stages in a ``placement``, cannot
    run."""
    if placement == V_SHAPE and has_attention_residuals(config):
        attention_residuals.refuse_v(schedule)
    check_chunks(schedule, placement, chunks)


def check_chunks(schedule: str, placement: str, chunks: Sequence[Any]) -> None:
    """Raises ScheduleInputError for model chunks that were built for another placement than the schedule's."""
    # Any chunk will do: the step names one in a wrong place, on all ranks (``runtime/model_checks/chunk_places.py``).
    built = len(chunks) > 1 and any(is_mirrored(wrapped_attribute(chunk, "pg_collection")) for chunk in chunks)
    if placement == V_SHAPE and not built:
        raise ScheduleInputError(
            f"config.pipeline_schedule {schedule!r} places stages in a v, and model chunk 1 was built for a loop; call "
            "install() and name the schedule before the GPTModel or HybridModel is built (other models: 'V placement' "
            "in docs/megatron_features.md)"
        )
    if placement != V_SHAPE and built:
        raise ScheduleInputError(
            f"model chunk 1 was built for stages in a v, and config.pipeline_schedule {schedule!r} places them in a "
            f"{placement}; build the model for this schedule"
        )


def _are_in_v(chunks: Sequence[Any]) -> bool:
    return len(chunks) > 1 and is_mirrored(wrapped_attribute(chunks[1], "pg_collection"))


def check_handed_back(reason: str, model: Any) -> None:
    """Raises ScheduleInputError for model chunks in a v, which Megatron's own schedules would run as chunks of a loop.
    ``reason``: why the engine does not serve the step."""
    if isinstance(model, (list, tuple)) and _are_in_v(model):
        raise ScheduleInputError(
            f"megatron_pp does not serve {reason}, and Megatron-core's own schedule, which would run the step, takes "
            "stages in a loop: model chunk 1 was built for stages in a v. Leave that setting out, or choose a "
            "pipeline_schedule whose stages are in a loop before the model is built"
        )


def hand_over_reports(reports: list[Any], communicator: P2PCore) -> None:
    """Copy what the last stage reports to the last rank, where Megatron's training loop reads the losses."""
    v_logs.hand_over(reports, communicator.pp_group, LAST_STAGE, communicator.size - 1, communicator.device)


def finalize(call: Callable[[torch.Tensor | None], Any], counted: torch.Tensor | None, group: Any) -> None:
    """``call`` Megatron's finalisation of gradients with the tokens that the last stage has ``counted``: it reads them
    on the last rank of the pipeline's ``group``."""
    if counted is not None:
        torch.distributed.broadcast(counted, torch.distributed.get_global_rank(group, LAST_STAGE), group)
    with shared_gradients_summed():
        call(counted)


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
    first = unwrapped(model[0])
    last = unwrapped(model[-1])
    if not (first.pre_process and last.post_process) or shared_weight(last) is None:
        return
    if getattr(model[0].ddp_config, "use_megatron_fsdp", False):
        raise ScheduleInputError("V placement with tied embeddings does not take Megatron-FSDP; untie them or use DDP")
    ours = _gradient(shared_weight(first))
    theirs = _gradient(shared_weight(last))
    if ours is not None and theirs is not None:  # None: the embedding is frozen
        ours.add_(theirs)
        theirs.copy_(ours)


def _gradient(weight: Any) -> torch.Tensor | None:
    return getattr(weight, "main_grad", weight.grad)

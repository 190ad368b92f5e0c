"""Checks that each model chunk was built for the stage that the plan runs it as."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatron_pp.common.log_once import warn_once
from megatron_pp.common.module_attributes import unwrapped, wrapped_attributes
from megatron_pp.faults.consistency import LAYERS
from megatron_pp.plan.ir.placement import Placement


def check_places(
    chunks: Sequence[Any], placement: Placement, rank: int, schedule: str, announce: Callable[[str], None] = warn_once
) -> None:
    """Raises ScheduleInputError if an attribute of a chunk contradicts its stage: PipelineStage's ``stage``, or
    Megatron's ``vp_stage``, ``pre_process``, ``post_process`` and layer numbers. A chunk without these is not checked;
    several PipelineStages without ``stage`` log a warning."""
    if placement.num_stages == 1 or not isinstance(chunks[0], torch.nn.Module):
        return
    wrong = next(_wrong_chunks(chunks, placement, rank), None)
    if wrong is not None:
        from megatron_pp.runtime.model_checks import misplaced_chunks

        raise misplaced_chunks.error_of(*wrong, placement, rank, schedule)
    # Only PipelineStages have this attribute; Megatron's models do not.
    if len(chunks) > 1 and any(wrapped_attributes(chunk, ["stage_in_model"], ...) == [None] for chunk in chunks):
        from megatron_pp.runtime.model_checks import misplaced_chunks

        announce(misplaced_chunks.warning(placement, schedule))


def _wrong_chunks(chunks: Sequence[Any], placement: Placement, rank: int) -> Iterator[tuple[int, str]]:
    """The number of each chunk that contradicts its stage, and which of its attributes does."""
    names = "stage_in_model", "vp_stage", "pre_process", "post_process"
    for number, chunk in enumerate(chunks):
        stage, vp_stage, first, last = wrapped_attributes(chunk, names)
        if stage is not None and stage != placement.stage(rank, number):
            yield number, f"this one was built with PipelineStage(stage={stage})"
        if len(chunks) > 1 and type(vp_stage) is int and vp_stage != number:
            yield number, f"this one was built with vp_stage={vp_stage}"
        for name, found, wanted in (
            ("pre_process", first, placement.is_first_stage(rank, number)),
            ("post_process", last, placement.is_last_stage(rank, number)),
        ):
            if type(found) is bool and found is not wanted:
                which = "first" if name == "pre_process" else "last"
                yield number, f"{name} of this one is {found}, and of the {which} stage alone it is True"
    if _have_layers(chunks):
        from megatron_pp.runtime.model_checks import layer_numbers

        yield from layer_numbers.wrong_chunks(chunks, placement.stages[rank])


def describe_layers(chunks: Sequence[Any], placement: Placement, rank: int) -> dict[str, str]:
    """The numbers of Megatron's layers on this rank, for all ranks to compare. Empty if there are none, and if
    ``check_places`` raises on this rank, because its error says more."""
    if placement.num_stages == 1 or not _have_layers(chunks) or any(_wrong_chunks(chunks, placement, rank)):
        return {}
    from megatron_pp.runtime.model_checks import layer_numbers

    text: str = layer_numbers.described(chunks, placement.stages[rank], rank)
    return {LAYERS: text} if text else {}


def _have_layers(chunks: Sequence[Any]) -> bool:
    """Whether the chunks may be models of Megatron's, which number their layers."""
    return any(hasattr(unwrapped(chunk), "decoder") for chunk in chunks)

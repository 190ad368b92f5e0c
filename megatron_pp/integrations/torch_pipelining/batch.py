"""The arguments of one step, by microbatch, as torch's ``step`` takes them: a whole batch, or microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.pipelining.microbatch import TensorChunkSpec, split_args_kwargs_into_chunks

from megatron_pp.errors import ScheduleInputError


@dataclass
class Batch:
    """For each microbatch: positional arguments of the first stage, keyword arguments of this rank's stages, target."""

    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[Mapping[str, Any]]
    targets: Sequence[Any] | None
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)


def split_batch(count: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any, *specs: Any) -> Batch:
    """A whole batch, cut into ``count`` microbatches. ``specs``: of ``args`` and ``kwargs``, as torch's helper takes
    them. Raises ScheduleInputError if the batch has fewer samples than that."""
    arg_mbs: list[Any] = [()] * count
    kwarg_mbs: list[Any] = [{}] * count
    if args or kwargs:
        arg_mbs, kwarg_mbs = split_args_kwargs_into_chunks(args, dict(kwargs), count, *specs)
        _check_count("the batch", len(arg_mbs), count)
    if target is None:
        return Batch(arg_mbs, kwarg_mbs, None)
    targets, _ = split_args_kwargs_into_chunks((target,), {}, count, (TensorChunkSpec(0),))
    _check_count("the target", len(targets), count)
    return Batch(arg_mbs, kwarg_mbs, [one for (one,) in targets])


def _check_count(what: str, found: int, count: int) -> None:
    if found != count:
        raise ScheduleInputError(f"{what} has samples for {found} microbatches, and the schedule has {count}")


def given_batch(count: int, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, whole: Mapping[str, Any]) -> Batch:
    """A batch that the caller has cut. ``whole``: the inputs that the caller gave uncut, by name. Raises
    ScheduleInputError for another number of microbatches, TypeError for other containers than torch's."""
    there = [name for name, value in whole.items() if value is not None and value != () and value != {}]
    if there:
        raise ScheduleInputError(
            f"{', '.join(there)} was given whole, and other inputs in microbatches; give all as arg_mbs, kwarg_mbs and "
            "target_mbs, or none"
        )
    kinds = {"arg_mbs": (arg_mbs, tuple), "kwarg_mbs": (kwarg_mbs, dict), "target_mbs": (target_mbs, object)}
    for name, (given, kind) in kinds.items():
        if given is None:
            continue
        if not isinstance(given, list):
            raise TypeError(f"{name} must be a list but got a {type(given)}")
        if len(given) != count:
            raise ScheduleInputError(f"Expecting {count} {name} but got {len(given)}")
        wrong = next((k for k, one in enumerate(given) if not isinstance(one, kind)), None)
        if wrong is not None:
            raise TypeError(f"{name}[{wrong}] is a {type(given[wrong])}; {name} is a list of {kind.__name__}s")
    return Batch(arg_mbs or [()] * count, kwarg_mbs or [{}] * count, target_mbs)

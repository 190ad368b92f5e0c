"""Schedule classes by name, for programs that ask torch's ``get_schedule_class`` for one, such as torchtitan."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from megatron_pp.integrations.torch_pipelining.schedule import OUR_NAME, PlanSchedule, our_name
from megatron_pp.plan.orders import find_family


def get_schedule_class(name: str) -> Any:
    """The PlanSchedule of the schedule ``name``: this package's, torch's (``"ZBVZeroBubble"``), or the path of a file.
    The class is called as torch's are, ``(stages, n_microbatches, loss_fn, scale_grads=...)``.

    As torch's, it is a subclass of PipelineScheduleSingle if a rank has one stage, and of PipelineScheduleMulti if it
    has several. Programs tell by that how many stages to make. Raises PlanError for an unknown name."""
    return _class_of(our_name(name))


@cache
def _class_of(schedule: str) -> Any:
    base: Any = PipelineScheduleSingle if find_family(schedule).chunks == 1 else PipelineScheduleMulti
    own = {
        "__module__": __name__,
        "default_schedule": schedule,
        "_step_microbatches": None,
    }  # ``step`` never calls these
    return type(f"PlanSchedule_{schedule}", (PlanSchedule, base), own)


def use_in(module: Any, **instead: str) -> None:
    """Replace torch's ``get_schedule_class`` and schedules in ``module``, under the names by which it imported them.

    ``instead``: schedules by torch's name in lower case, as in ``use_in(module, zbvzerobubble="v_half")``."""
    ours = {name: get_schedule_class(instead.get(name, name)) for name in OUR_NAME}
    theirs = {schedules.get_schedule_class(name): found for name, found in ours.items()}
    for name, value in list(vars(module).items()):
        if value is schedules.get_schedule_class:
            setattr(module, name, lambda asked: ours.get(asked.lower()) or get_schedule_class(asked))
        elif isinstance(value, type) and value in theirs:
            setattr(module, name, theirs[value])

"""The engines that benchmarks compare. `make_step(engine, work, ...)` returns a function that runs a step.

| name                | engine                                                                                |
| ------------------- | ------------------------------------------------------------------------------------- |
| ours                | megatron_pp                                                                           |
| plug-in             | megatron_pp under `install()`, in Megatron-core's training loop                       |
| megatron            | Megatron-core's own schedules, of the installed package                               |
| megatron-main       | the schedules of a checkout of Megatron-LM (`--megatron-source`)                      |
| torch               | torch.distributed.pipelining                                                          |
| torch per-edge      | the same with a process group for each edge, which torch has from 2.15 on             |

If an engine is not installed, or lacks the schedule, `make_step` raises Unavailable with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from benchmarks.work import PLUG_IN, MakeStage, Step, Unavailable, Work

ENGINES = ("ours", "megatron", "megatron-main", "torch", "torch per-edge")
IN_MEGATRON = (PLUG_IN, "megatron", "megatron-main")


def make_step(engine: str, work: Work, rank: int, group: Any, make_stage: MakeStage, transport: Any = None) -> Step:
    """A function that runs one training step of ``work`` on ``rank``, forward and backward.

    group       torch.distributed's group of all ranks (None for a pipeline of one)
    make_stage  stage number -> module from [s, b, h] to [s, b, h]
    transport   the transport of our engine, instead of ``group``

    Raises Unavailable."""
    if engine == "ours":
        from benchmarks.engine_ours import make
    elif engine in IN_MEGATRON:
        from benchmarks.engine_megatron import make
    elif engine.startswith("torch"):
        from benchmarks.engine_torch import make
    else:
        raise ValueError(f"engine {engine!r} is not one of {', '.join((*ENGINES, PLUG_IN))}")
    return make(engine, work, rank, group, make_stage, transport)


def comparable(engine: str, work: Work) -> Work:
    """``work`` with a policy that ``engine`` has. torch has one policy, and Megatron-core overlaps only with chunks."""
    if engine.startswith("torch"):
        return replace(work, policy="overlap")
    if engine.startswith("megatron") and work.num_chunks == 1 and work.overlaps:
        return replace(work, policy="plain")
    return work


def available_steps(
    work: Work, rank: int, group: Any, make_stage: MakeStage, transport: Any = None, engines: Sequence[str] = ENGINES
) -> tuple[dict[str, Step], dict[str, str]]:
    """Two dicts: engine -> its step of ``work``, and engine -> a remark: why it has no step, or which other policy it
    runs."""
    steps: dict[str, Step] = {}
    remarks: dict[str, str] = {}
    for engine in engines:
        theirs = comparable(engine, work)
        try:
            steps[engine] = make_step(engine, theirs, rank, group, make_stage, transport)
        except Unavailable as reason:
            remarks[engine] = str(reason)
        else:
            remarks[engine] = "" if theirs == work else f"its {theirs.policy}"
    return steps, remarks


def surroundings(engine: str) -> AbstractContextManager[None]:
    """The context in which a step of ``engine`` runs. Entering it does not count as part of the step."""
    if engine not in IN_MEGATRON:
        return nullcontext()
    from benchmarks.megatron_library import load
    from megatron_pp.integrations.megatron_core import installed

    # Outside of install() the plug-in's step would call Megatron's own schedule.
    return installed() if engine == PLUG_IN else load(engine).current()

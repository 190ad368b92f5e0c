"""Random specs of plans: a schedule with any settings that it allows."""

from __future__ import annotations

import random
from typing import Any

from megatron_pp.feature_table import CACHES
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.ir.feature import known_settings
from megatron_pp.plan.ir.spec import (
    CHANNELS,
    DEVICE_SYNC,
    EXPLICIT,
    HOOKS,
    ON_NCCL,
    ONE_QUEUE,
    POLICIES,
    STATIC_BUFFERS,
    PlanSpec,
    Shape,
)
from megatron_pp.plan.orders import SCHEDULES

NAMED = [name for name, family in SCHEDULES.items() if family.search is None]
# Combinations of device rules that a run may have. With static buffers a single rank can have few hand-offs between
# chunks.
DEVICES = [(), (ONE_QUEUE,), ON_NCCL, (*ON_NCCL, DEVICE_SYNC), (*ON_NCCL, STATIC_BUFFERS)]


def drawn_spec(schedule: str, rng: random.Random, **fixed: Any) -> PlanSpec:
    """A random spec with up to 4 ranks, 3 chunks and 14 microbatches. ``fixed`` sets fields."""
    family = SCHEDULES[schedule]
    size = rng.choice((1, 2, 3, 4))
    chunks = family.chunks or rng.choice((1, 2, 3))
    drawn: dict[str, Any] = {
        "pipeline_size": size,
        "num_chunks": chunks,
        "num_microbatches": rng.randint(1, 3 * size + 2),
        "group_size": rng.choice((0, 0, size + 1, 2 * size)) if family.grouped else 0,
        "policy": rng.choice(POLICIES),
        "channels": rng.choice(CHANNELS),
        "forward_only": rng.random() < 0.15,
        "variable_shapes": rng.random() < 0.3,
        "release_after": rng.choice((1, 1, 2, 3, 50)),
        "lookahead": rng.choice((0, 1, 1, 2, 4)),
        "grad_sync": rng.choice((HOOKS, EXPLICIT)),
        "param_sync": rng.random() < 0.5,
        "split_backward": rng.random() < 0.8,
        **known_settings(slices=rng.choice((1, 2, 3)) if family.sliced else 1),
        "measured": rng.choice((None, None, Measured(1.0, (1.5,) * size * chunks, 0.5, transfer=0.1))),
        "device": rng.choice(DEVICES[: 5 if size > 1 else 4]),
    }
    added = _of_a_feature(rng.choice(("pairs", "offload", "named", "", "")), schedule, size, chunks, rng)
    drawn |= known_settings(**added)  # a copy of the package may lack a feature
    return PlanSpec(schedule, **{**drawn, **fixed})


def _of_a_feature(feature: str, schedule: str, size: int, chunks: int, rng: random.Random) -> dict[str, Any]:
    last = size * chunks - 1
    if feature == "pairs" and not SCHEDULES[schedule].added(Shape(size, chunks, 2, 2)):
        return {"overlap_pairs": True}
    if feature == "offload":
        return {"offload_chunks": rng.randint(1, chunks), "offload_slots": rng.randint(1, 3)}
    if feature == "named" and last > 0:
        tensors = rng.choice(("blocks", f"a=0>{last}; m=0>1 no_grad"))
        return {"skip_tensors": tensors, "skip_cache": rng.choice(CACHES)}
    return {}

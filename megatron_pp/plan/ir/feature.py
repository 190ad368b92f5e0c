"""What a feature adds to plans: its instructions, listed here by name and kind, and rows for the core's tables in a
module of its folder, which loads with the first of its instructions (docs/adding_an_instruction.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from megatron_pp.on_demand import load

if TYPE_CHECKING:
    from megatron_pp.plan.ir.ledger import Memory, Site
    from megatron_pp.plan.ir.rules import Rule

# Kinds: what verification, simulation and drawings have to know of an instruction.
PASS = "pass"  # compute of every rank, whose inputs collectives bring
COLLECTIVE = "collective"  # posts one of all ranks; never blocks
COLLECTIVE_WAIT = "collective wait"
TO_HOST = "copy to host"  # posts a copy from device to host memory; never blocks
FROM_HOST = "copy from host"
COPY_WAIT = "copy wait"
RELEASE = "release"  # of a named tensor
GATHER = "gather"  # posts a collective of the rank's data-parallel replicas; never blocks; of a stage, no microbatch
SCATTER = "scatter"  # likewise
REPLICA_WAIT = "wait for replicas"
RESHARDING = "reshard"


class FeatureOp(NamedTuple):
    """``rows``: the module, a name in ``on_demand``; ``kind``: one of those above; ``post``: what a wait waits for."""

    rows: str
    kind: str
    post: str = ""


FEATURE_OPS = {
    "S": FeatureOp("output_instructions", PASS),
    "T": FeatureOp("output_instructions", PASS),
    "BROADCAST": FeatureOp("output_instructions", COLLECTIVE),
    "ALL_REDUCE": FeatureOp("output_instructions", COLLECTIVE),
    "REDUCE": FeatureOp("output_instructions", COLLECTIVE),
    "WAIT_BROADCAST": FeatureOp("output_instructions", COLLECTIVE_WAIT, "BROADCAST"),
    "WAIT_ALL_REDUCE": FeatureOp("output_instructions", COLLECTIVE_WAIT, "ALL_REDUCE"),
    "WAIT_REDUCE": FeatureOp("output_instructions", COLLECTIVE_WAIT, "REDUCE"),
    "OFFLOAD": FeatureOp("offload_instructions", TO_HOST),
    "FREE_OFFLOAD": FeatureOp("offload_instructions", COPY_WAIT, "OFFLOAD"),
    "LOAD": FeatureOp("offload_instructions", FROM_HOST),
    "WAIT_LOAD": FeatureOp("offload_instructions", COPY_WAIT, "LOAD"),
    "DROP": FeatureOp("skip_instructions", RELEASE),
    "UNSHARD": FeatureOp("fsdp_instructions", GATHER),
    "WAIT_UNSHARD": FeatureOp("fsdp_instructions", REPLICA_WAIT, "UNSHARD"),
    "RESHARD": FeatureOp("fsdp_instructions", RESHARDING),
    "REDUCE_GRAD": FeatureOp("fsdp_instructions", SCATTER),
    "WAIT_REDUCE_GRAD": FeatureOp("fsdp_instructions", REPLICA_WAIT, "REDUCE_GRAD"),
}
"""Every instruction of a feature."""


@dataclass(frozen=True)
class PlanFeature:
    """The rows of a feature, by op.

    names     in words, for error messages
    rules     what is valid
    facts     in words, by fact: a bit that no other feature has
    changes   of memory, in all stages or by site
    in_order  of what the loss stage's rank runs in the order of microbatches: name and reason in words
    ends_use  the posts whose tensor nothing reads any more behind the op
    """

    names: Mapping[str, str]
    rules: Mapping[str, Rule]
    facts: Mapping[int, str]
    changes: Mapping[str, Memory | Callable[[Site], Memory]] = field(default_factory=dict)
    in_order: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    ends_use: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def of_kind(*kinds: str) -> frozenset[str]:
    return frozenset(op for op, row in FEATURE_OPS.items() if row.kind in kinds)


def feature_of(op: str) -> PlanFeature | None:
    """The rows of the feature that adds ``op``; None for an instruction of the core."""
    return rows_of(FEATURE_OPS[op].rows) if op in FEATURE_OPS else None


def rows_of(name: str) -> PlanFeature:
    rows: PlanFeature = load(name).ROWS
    return rows

"""The one table of features. The core names none elsewhere: it finds in a feature's row which module has its hooks,
and what the feature adds to instructions, specs, memory and schedules (docs/adding_an_instruction.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Kinds: what verification, simulation and drawings have to know of an instruction.
PASS = "pass"  # compute of every rank, whose inputs collectives bring
COLLECTIVE = "collective"  # posts one of all ranks; never blocks
COLLECTIVE_WAIT = "collective wait"
TO_HOST = "copy to host"  # posts a copy from device to host memory; never blocks
FROM_HOST = "copy from host"
COPY_WAIT = "copy wait"
RELEASE = "release"  # of what a message with a name brought
GATHER = "gather"  # posts a collective of the rank's data-parallel replicas; never blocks; of a stage, no microbatch
SCATTER = "scatter"  # likewise
REPLICA_WAIT = "wait for replicas"
STAGE_RELEASE = "release of a stage"
JOINED = "joined"  # operations that run as one, each with its send behind it where that goes out within

CACHES = NO_CACHE, RECEIVED, ALL = ("none", "received", "all")
"""What ranks keep of named tensors (``features/skip_tensors/routes.py``)."""

FSDP_COLLECTIVES = PER_STEP, PER_RUN, ZERO2, ZERO3, BY_COST = ("per_step", "per_run", "zero2", "zero3", "by_cost")
"""Presets, and by cost (``features/fsdp``)."""


class FeatureOp(NamedTuple):
    """An instruction. ``kind``: one of those above; ``post``: what a wait waits for."""

    kind: str
    post: str = ""


@dataclass(frozen=True)
class Row:
    """A feature. Modules are named as ``on_demand.load`` takes them, with their folder.

    folder      in ``features/``
    rows        the module whose ROWS, a ``PlanFeature``, has the rows of its instructions
    plan        the module whose HOOKS, a ``PlanHooks``, take part in orders, lowering and verification
    step        the module whose STEP, a ``StepHooks``, takes part in a step
    ops         its instructions
    spec        its settings of a plan's spec, with their defaults
    private     those of these settings in which ranks may differ
    written     whether files of plans have these settings also where all are the defaults
    config      its settings of the config, with their defaults
    shown       settings of a spec by the names that they have for users, where these differ
    costs       the module whose COSTS, ``CostHooks``, say what its costs mean, and whose CHARGES, ``Charges``, what
                the simulator makes of its instructions
    stage_times its times per stage of the model -> the instructions that take them
    other_costs its other costs, with their defaults
    measured    those of these costs that a run can measure
    tensors     what it adds to the counts of live tensors (``plan/ir/ledger.py``)
    views       what it adds to the counts that are views on them, or of other memory
    families    schedules in the folder, name -> module, by the name of the one behind which they are listed
    of_barriers whether it takes part in plans whose placement has barriers
    of_names    whether messages with a name are its own
    of_models   whether it also checks steps once the program has loaded the module of ``step``, as for a layer
    """

    folder: str
    rows: str = ""
    plan: str = ""
    step: str = ""
    ops: Mapping[str, FeatureOp] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)
    private: tuple[str, ...] = ()
    written: bool = True
    config: Mapping[str, Any] = field(default_factory=dict)
    shown: Mapping[str, str] = field(default_factory=dict)
    costs: str = ""
    stage_times: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    other_costs: Mapping[str, Any] = field(default_factory=dict)
    measured: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    views: tuple[str, ...] = ()
    families: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    of_barriers: bool = False
    of_names: bool = False
    of_models: bool = False


_SLICED = "seq_1f1b", "interleaved_seq_1f1b", "seq_zb", "interleaved_seq_zb"

FEATURES = (
    # From the innermost to the outermost of those that run one forward or backward.
    Row(
        "skip_tensors",
        rows="skip_tensors.skip_instructions",
        plan="skip_tensors.skip_hooks",
        step="skip_tensors.skip_runner",
        ops={"DROP": FeatureOp(RELEASE)},
        spec={"skip_tensors": (), "skip_cache": RECEIVED},
        written=False,
        config={"skip_tensors": None, "skip_cache": RECEIVED},
        tensors=(
            "held",  # named tensors that the rank made or received, and has not dropped
            "held_grads",  # sums of their gradients, which are not sent or used up yet
        ),
        of_names=True,
    ),
    Row(
        "offload",
        rows="offload.offload_instructions",
        plan="offload.offload_lowering",
        step="offload.offload_runner",
        ops={
            "OFFLOAD": FeatureOp(TO_HOST),
            "FREE_OFFLOAD": FeatureOp(COPY_WAIT, "OFFLOAD"),
            "LOAD": FeatureOp(FROM_HOST),
            "WAIT_LOAD": FeatureOp(COPY_WAIT, "LOAD"),
        },
        spec={"offload_chunks": None, "offload_slots": 1},
        private=("offload_chunks", "offload_slots"),
        config={"offload_chunks": None, "offload_slots": 1},
        costs="offload.offload_costs",
        stage_times={"offload": ("OFFLOAD", "LOAD")},
        measured=("offload",),
        families={"interleaved_zb": {"pipe_offload": "pipe_offload"}},
    ),
    Row(
        "slices",
        plan="slices.slice_hooks",
        step="slices.sequence_slice",
        spec={"slices": 1},
        # (chunk, microbatch) pairs whose keys and values attention keeps for later slices: from the forward of the
        # first slice, each forward adding its own, until the backward of the first one (in evaluation, the last
        # forward).
        views=("key_values",),
        config={"sequence_slices": 1},
        shown={"slices": "sequence_slices"},
        costs="slices.slice_times",
        other_costs={"attention": 0.0},
        families={"dualpipe_v": dict.fromkeys(_SLICED, "sliced")},
    ),
    Row(
        "output_layer",
        rows="output_layer.output_instructions",
        plan="output_layer.output_lowering",
        step="output_layer.output_runner",
        ops={
            "S": FeatureOp(PASS),
            "T": FeatureOp(PASS),
            "BROADCAST": FeatureOp(COLLECTIVE),
            "ALL_REDUCE": FeatureOp(COLLECTIVE),
            "REDUCE": FeatureOp(COLLECTIVE),
            "WAIT_BROADCAST": FeatureOp(COLLECTIVE_WAIT, "BROADCAST"),
            "WAIT_ALL_REDUCE": FeatureOp(COLLECTIVE_WAIT, "ALL_REDUCE"),
            "WAIT_REDUCE": FeatureOp(COLLECTIVE_WAIT, "REDUCE"),
        },
        costs="output_layer.output_costs",
        other_costs={"output_layer": (0.0, 0.0, 0.0), "passes": (0.0, 0.0)},
        views=("logits",),  # microbatches between S and T: their softmax is kept, of the rank's rows
        families={"dualpipe_v": {"vocab_1f1b": "vocabulary", "vocab_1f1b_alg1": "vocabulary"}},
        of_barriers=True,
        of_models=True,
    ),
    Row(
        "fsdp",
        rows="fsdp.fsdp_instructions",
        plan="fsdp.fsdp_lowering",
        step="fsdp.fsdp_runner",
        ops={
            "UNSHARD": FeatureOp(GATHER),
            "WAIT_UNSHARD": FeatureOp(REPLICA_WAIT, "UNSHARD"),
            "RESHARD": FeatureOp(STAGE_RELEASE),
            "REDUCE_GRAD": FeatureOp(SCATTER),
            "WAIT_REDUCE_GRAD": FeatureOp(REPLICA_WAIT, "REDUCE_GRAD"),
        },
        spec={"fsdp_collectives": "", "fsdp_max_active_stages": 0},
        config={"fsdp_collectives": None, "fsdp_max_active_stages": None},
        costs="fsdp.fsdp_costs",
        stage_times={"unshard": ("UNSHARD",), "reduce_grad": ("REDUCE_GRAD",)},
        measured=("unshard", "reduce_grad"),
        views=(
            "unsharded",  # stages whose parameters are whole, or on their way
            "unreduced",  # stages with whole gradients: from the first one until the reduction is over
        ),
    ),
    Row(
        "pairs",
        rows="pairs.pair_instructions",
        plan="pairs.pair_hooks",
        step="pairs.pair_runner",
        ops={"PAIR": FeatureOp(JOINED)},
        spec={"overlap_pairs": False},
        config={"overlapped_forward_backward": None},
        costs="pairs.pair_costs",
        other_costs={"pair_sends": (1.0, 1.0)},
        families={"gis_h": {"combined_1f1b": "combined"}},
    ),
)


def families_behind(name: str) -> dict[str, str]:
    """The schedules of features that are listed behind ``name``, with their modules."""
    return {
        family: f"megatron_pp.features.{row.folder}.{module}"
        for row in FEATURES
        for family, module in row.families.get(name, {}).items()
    }


FEATURE_OPS = {op: kind for row in FEATURES for op, kind in row.ops.items()}
"""Every instruction of a feature."""
ROW_OF = {op: row for row in FEATURES for op in row.ops}
SPEC_DEFAULTS = {name: default for row in FEATURES for name, default in row.spec.items()}
"""Every setting of a plan's spec that is a feature's."""
PRIVATE_SETTINGS = {name for row in FEATURES for name in row.private}

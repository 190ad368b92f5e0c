"""The instructions for stages that FSDP2 shards: when they are valid, and how they change memory. Each belongs to one
stage and has no microbatch. ``shard_lifetime.py`` follows their facts, which are those of a stage.
"""

from megatron_pp.feature_table import ZERO2, ZERO3
from megatron_pp.plan.ir.feature import PlanFeature
from megatron_pp.plan.ir.ledger import Memory
from megatron_pp.plan.ir.rules import Rule

UNSHARD = "UNSHARD"  # allocate the stage's whole parameters and post their all-gather; never blocks
WAIT_UNSHARD = "WAIT_UNSHARD"  # wait for that all-gather
RESHARD = "RESHARD"  # free the whole parameters
REDUCE_GRAD = "REDUCE_GRAD"  # post the reduce-scatter of the gradients that the stage has made since the one before
WAIT_REDUCE_GRAD = "WAIT_REDUCE_GRAD"  # wait for that reduce-scatter, then free the whole gradients

REDUCES_EACH = (ZERO2, ZERO3)
"""The values of ``fsdp_collectives`` that reduce the gradients of each microbatch, and not their sum."""

POSTED, WHOLE, USED, RESHARDED, GRADIENTS, REDUCING, REDUCED = (1 << k for k in range(26, 33))

ROWS = PlanFeature(
    names={
        UNSHARD: "unshard",
        WAIT_UNSHARD: "wait for the unshard",
        RESHARD: "reshard",
        REDUCE_GRAD: "gradient reduction",
        WAIT_REDUCE_GRAD: "wait for the gradient reduction",
    },
    rules={
        UNSHARD: Rule(0, POSTED),  # once until the next RESHARD, for as many stages as may be whole at a time
        WAIT_UNSHARD: Rule(POSTED, WHOLE),  # once per UNSHARD, before the stage's next operation
        RESHARD: Rule(WHOLE | USED, RESHARDED),  # once per UNSHARD, after the operations for which it was posted
        REDUCE_GRAD: Rule(GRADIENTS, REDUCING),  # after a gradient; after the last one unless each is reduced
        WAIT_REDUCE_GRAD: Rule(REDUCING, REDUCED),  # once per REDUCE_GRAD, before the stage's next one
    },
    facts={
        POSTED: "its unshard was posted",
        WHOLE: "its parameters are whole",
        USED: "an operation used its parameters",
        RESHARDED: "its parameters were resharded",
        GRADIENTS: "it has gradients to reduce",
        REDUCING: "the reduction of its gradients was posted",
        REDUCED: "the reduction of its gradients is over",
    },
    lacking="the plan's spec has no fsdp_collectives",
    changes={UNSHARD: Memory(unsharded=1), RESHARD: Memory(unsharded=-1), WAIT_REDUCE_GRAD: Memory(unreduced=-1)},
)

ENDS = {
    UNSHARD: RESHARDED,
    WAIT_UNSHARD: 0,
    RESHARD: POSTED | WHOLE | USED,
    REDUCE_GRAD: GRADIENTS | REDUCED,
    WAIT_REDUCE_GRAD: REDUCING,
}
"""Instruction -> the facts that it ends."""

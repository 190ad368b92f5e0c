"""The instructions for an output layer that is split over all ranks (arXiv 2411.05288): its passes and collectives,
when they are valid, what they need, and how they change memory. All are of one microbatch, on every rank.
"""

from megatron_pp.plan.ir.dataflow import Result
from megatron_pp.plan.ir.feature import PlanFeature
from megatron_pp.plan.ir.instruction import BACKWARD, BACKWARD_OPS, FORWARD
from megatron_pp.plan.ir.ledger import Memory, Site
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.rules import F_RAN, Rule

OUTPUT_S = "S"  # logits of its rows, and their softmax statistics; with one barrier also the input gradient's part
OUTPUT_T = "T"  # weight gradient of its rows; with two barriers also the input gradient's part
# Posted on every rank, and waited for there.
BROADCAST = "BROADCAST"  # the last stage's output, to every rank
ALL_REDUCE = "ALL_REDUCE"  # the softmax statistics; with one barrier also the parts of the output's gradient
REDUCE = "REDUCE"  # with two barriers: the parts of the output's gradient, to the last stage's rank
WAIT_BROADCAST = "WAIT_BROADCAST"
WAIT_ALL_REDUCE = "WAIT_ALL_REDUCE"
WAIT_REDUCE = "WAIT_REDUCE"

X_POSTED, X_HERE, S_RAN, R_POSTED, R_HERE, T_RAN, G_POSTED, G_HERE = (1 << k for k in range(13, 21))


def output_stages(placement: Placement) -> tuple[int, ...]:
    """The stages of the passes S and T, one on each rank; none if the output layer is whole."""
    return tuple(range(placement.num_stages)) if placement.barriers else ()


def output_root(placement: Placement) -> int:
    """The rank of the last stage, whose output is broadcast."""
    return placement.homes[-1][0]


def needs_at_root(op: str, needs: int, barriers: int) -> int:
    """The facts that an instruction of the last stage needs: this stage has its own output, and its backward needs the
    gradient that collectives bring."""
    if op == OUTPUT_S:
        return X_POSTED
    return needs | (R_HERE if barriers == 1 else G_HERE) if op in BACKWARD_OPS else needs


def facts_at_end(placement: Placement, forward_only: bool) -> int:
    """The facts that every cell of the passes must have after the step."""
    facts = X_POSTED | X_HERE | S_RAN | R_POSTED | R_HERE
    if forward_only:
        return facts
    return facts | T_RAN | (G_POSTED | G_HERE if placement.barriers == 2 else 0)


def collected_inputs(op: str, stage: int, placement: Placement) -> tuple[Result, ...]:
    """The results that an operation needs and that collectives bring.

    S needs the last stage's output (a broadcast), T the statistics of every rank's S (an all-reduce). The last stage's
    backward needs the gradient parts of every rank's S with one barrier, and those of every rank's T with two."""
    last = placement.num_stages - 1
    if op == OUTPUT_S:
        return ((FORWARD, last),)
    if op == OUTPUT_T:
        return tuple((OUTPUT_S, other) for other in output_stages(placement))
    if stage == last and op in BACKWARD_OPS:
        return tuple((OUTPUT_S if placement.barriers == 1 else OUTPUT_T, other) for other in output_stages(placement))
    return ()


def moved_by(op: str, barriers: int) -> str | None:
    """Whether a collective moves an activation or a gradient; None for statistics, which count as having no size."""
    if op == ALL_REDUCE and barriers == 2:
        return None
    return FORWARD if op == BROADCAST else BACKWARD


def _part(op: str, at: Site) -> bool:
    """Whether ``op`` makes a part of the output's gradient."""
    return at.trains and op == (OUTPUT_S if at.barriers == 1 else OUTPUT_T)


def _pass(op: str, at: Site) -> Memory:
    """The change of memory by a pass. The last pass frees the tensor of the broadcast, on the root its own output."""
    used = op == (OUTPUT_T if at.trains else OUTPUT_S)
    return Memory(
        outputs=-(used and at.is_root and at.gives_back),
        inputs=-(used and not at.is_root),
        input_grads=_part(op, at),
        logits=at.trains * (1 if op == OUTPUT_S else -1),
    )


def _summed(op: str, at: Site) -> Memory:
    """The change of memory by a sum: the parts of the output's gradient are sent, and their sum exists."""
    over = at.trains and op == (WAIT_ALL_REDUCE if at.barriers == 1 else WAIT_REDUCE)
    return Memory(output_grads=at.is_root and over, input_grads=-over)


ROWS = PlanFeature(
    names={
        OUTPUT_S: "output layer's logits",
        OUTPUT_T: "output layer's weight gradient",
        BROADCAST: "broadcast of the last stage's output",
        ALL_REDUCE: "all-reduce of the softmax statistics",
        REDUCE: "reduction of the output's gradient",
        WAIT_BROADCAST: "wait for the broadcast of the last stage's output",
        WAIT_ALL_REDUCE: "wait for the all-reduce of the softmax statistics",
        WAIT_REDUCE: "wait for the reduction of the output's gradient",
    },
    rules={
        BROADCAST: Rule(F_RAN, X_POSTED),  # once, after the rank's forward; on the last stage that makes it
        WAIT_BROADCAST: Rule(X_POSTED, X_HERE),  # once per broadcast; before S, on the last stage's rank at any time
        OUTPUT_S: Rule(X_HERE, S_RAN),  # once, after the last stage's output is there
        ALL_REDUCE: Rule(S_RAN, R_POSTED),  # once, after S
        WAIT_ALL_REDUCE: Rule(R_POSTED, R_HERE),  # once per all-reduce, before T; on the last stage's rank in order
        OUTPUT_T: Rule(X_HERE | R_HERE, T_RAN),  # once, after the statistics of all ranks are there
        REDUCE: Rule(T_RAN, G_POSTED),  # once with two barriers, after T
        WAIT_REDUCE: Rule(G_POSTED, G_HERE),  # once per reduction, on the last stage's rank before its backward
    },
    facts={
        X_POSTED: "the broadcast of the last stage's output was posted",
        X_HERE: "the broadcast of the last stage's output is over",
        S_RAN: "its pass S ran",
        R_POSTED: "the all-reduce of its softmax statistics was posted",
        R_HERE: "its softmax statistics are there",
        T_RAN: "its pass T ran",
        G_POSTED: "the reduction of the last output's gradient was posted",
        G_HERE: "the reduction of the last output's gradient is over",
    },
    changes={
        BROADCAST: lambda at: Memory(act_buffers=not at.is_root),
        WAIT_BROADCAST: lambda at: Memory() if at.is_root else Memory(act_buffers=-1, inputs=1),
        OUTPUT_S: lambda at: _pass(OUTPUT_S, at),
        OUTPUT_T: lambda at: _pass(OUTPUT_T, at),
        WAIT_ALL_REDUCE: lambda at: _summed(WAIT_ALL_REDUCE, at),
        WAIT_REDUCE: lambda at: _summed(WAIT_REDUCE, at),
    },
    in_order={WAIT_ALL_REDUCE: ("loss", "losses are reported in order")},
)

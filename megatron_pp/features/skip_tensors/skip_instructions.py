"""The instruction that named tensors add to plans; ``skip_lifetime.py`` checks and counts it."""

from megatron_pp.plan.ir.feature import PlanFeature
from megatron_pp.plan.ir.instruction import RECV_F, SEND_F
from megatron_pp.plan.ir.ledger import Memory
from megatron_pp.plan.ir.rules import Rule

DROP = "DROP"  # nothing on the rank uses its copy of the tensor any more, nor is it being sent: release it
DROPPED = 1 << 12

ROWS = PlanFeature(
    names={DROP: "release of the tensor"},
    rules={DROP: Rule(0, DROPPED)},  # once per named tensor on a rank
    facts={DROPPED: "it was dropped"},
    lacking="the plan has no named tensors",
    changes={DROP: Memory(held=-1)},
    ends_use={DROP: (RECV_F, SEND_F)},
)

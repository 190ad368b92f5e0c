"""The instructions for copies to host memory: when they are valid, and how they change memory."""

from megatron_pp.plan.ir.feature import PlanFeature
from megatron_pp.plan.ir.instruction import BACKWARD_OPS, RECV_F
from megatron_pp.plan.ir.ledger import Memory
from megatron_pp.plan.ir.rules import B_RAN, F_RAN, Rule

# All four are about the tensors that a forward keeps for its backward.
OFFLOAD = "OFFLOAD"  # post their copy to the host, behind the forward; never blocks
FREE_OFFLOAD = "FREE_OFFLOAD"  # wait for that copy, then free the device memory
LOAD = "LOAD"  # allocate them on the device and post the copy back; never blocks
WAIT_LOAD = "WAIT_LOAD"  # wait for that copy, then free the host memory

OFFLOADED, OFFLOAD_FREED, LOADED, LOAD_HERE = (1 << k for k in range(21, 25))

ROWS = PlanFeature(
    names={OFFLOAD: "offload", FREE_OFFLOAD: "release after the offload", LOAD: "load", WAIT_LOAD: "wait for the load"},
    rules={
        # once at most, between the forward and its backward, which then needs it back
        OFFLOAD: Rule(F_RAN, OFFLOADED, B_RAN, may=OFFLOADED, then=(BACKWARD_OPS, LOAD_HERE)),
        FREE_OFFLOAD: Rule(OFFLOADED, OFFLOAD_FREED, may=OFFLOAD_FREED),  # once per OFFLOAD
        LOAD: Rule(OFFLOAD_FREED, LOADED, may=LOADED),  # once per OFFLOAD, after its release
        WAIT_LOAD: Rule(LOADED, LOAD_HERE, may=LOAD_HERE),  # once per LOAD, before the backward
    },
    facts={
        OFFLOADED: "its offload was posted",
        OFFLOAD_FREED: "its offload was waited for",
        LOADED: "its load was posted",
        LOAD_HERE: "what was offloaded is back",
    },
    changes={
        OFFLOAD: Memory(on_host=1),
        FREE_OFFLOAD: lambda at: Memory(in_flight=-1, inputs=-at.own_input),
        LOAD: lambda at: Memory(in_flight=1, inputs=at.own_input),
        WAIT_LOAD: Memory(on_host=-1),
    },
    ends_use={FREE_OFFLOAD: (RECV_F,)},  # what LOAD brings back is a tensor of its own
)

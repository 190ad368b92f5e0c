"""The ledger of memory: what each instruction adds to what a rank keeps, for all who count it: verification, the
simulator, searches, ``advise`` and drawings.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.feature import feature_of


class Memory(NamedTuple):
    """Live pipeline tensors of one rank, in tensors (one per message, whatever its size).

    outputs        stage outputs that still hold their data
    inputs         received (or handed) activations kept for the backward
    act_buffers    posted receives of activations that were not waited yet
    output_grads   received (or handed) gradients kept for the backward
    input_grads    input gradients that still hold their data
    grad_buffers   posted receives of gradients that were not waited yet
    held           named tensors that the rank made or received, and has not dropped
    held_grads     sums of their gradients, which are not sent or used up yet

    Views on them, not more of them:

    pending_sends  sends posted and not released (their tensors are among outputs and input_grads)
    in_flight      (chunk, microbatch) pairs, or slices of them, between their forward and their backward: what autograd
                   keeps on the device
    unsharded      stages whose parameters are whole, or on their way, on a rank that shards them (FSDP2)
    unreduced      stages with whole gradients: from the first one until the reduction is over
    on_host        those with a buffer in host memory: offloaded, and not back
    weight_backlog pairs between an input-gradient backward and its W
    logits         microbatches between S and T of a split output layer: their softmax is kept, of the rank's rows
    key_values     pairs whose keys and values attention keeps for later slices: from the forward of the first slice,
                   each forward adding its own, until the backward of the first one (in evaluation, the last forward)
    """

    outputs: int = 0
    inputs: int = 0
    act_buffers: int = 0
    output_grads: int = 0
    input_grads: int = 0
    grad_buffers: int = 0
    held: int = 0
    held_grads: int = 0
    pending_sends: int = 0
    in_flight: int = 0
    weight_backlog: int = 0
    key_values: int = 0
    logits: int = 0
    unsharded: int = 0
    unreduced: int = 0
    on_host: int = 0

    @property
    def tensors(self) -> int:
        """Pipeline tensors alive together."""
        return sum(self[:VIEWS])


KINDS = {name: kind for kind, name in enumerate(Memory._fields)}
VIEWS = KINDS["pending_sends"]  # the first that counts no more tensors


class Site(NamedTuple):
    """What the changes of a stage depend on; by default a middle stage with its neighbours on other ranks.

    has_input   whether a stage before it makes its input
    has_output  whether a stage behind it, or a split output layer, uses its output
    is_root     whether a split output layer uses it
    handed_in   whether the stage before is on the same rank
    handed_on   whether the stage behind is
    gives_back  whether an output's data goes when it was sent or handed on, and not with its backward
    trains      whether there are backwards
    barriers    of a split output layer
    """

    has_input: bool = True
    has_output: bool = True
    is_root: bool = False
    handed_in: bool = False
    handed_on: bool = False
    gives_back: bool = True
    trains: bool = True
    barriers: int = 0

    @property
    def own_input(self) -> bool:
        """Whether its input is a tensor of its own, and not the output of the stage before."""
        return self.has_input and (self.gives_back or not self.handed_in)


def _backward(at: Site) -> Memory:
    return Memory(
        outputs=-((at.handed_on or at.is_root) and not at.gives_back),
        inputs=-at.own_input,
        output_grads=-at.has_output,
        input_grads=at.has_input,
        in_flight=-1,
    )


_CHANGES: Mapping[str, Memory | Callable[[Site], Memory]] = {
    ins.RECV_F: Memory(act_buffers=1),
    ins.WAIT_F: Memory(act_buffers=-1, inputs=1),
    # Given back, the output's storage becomes the input's; else it stays the output's until its backward.
    ins.HAND_F: lambda at: Memory(outputs=-1, inputs=1) if at.gives_back else Memory(),
    ins.FORWARD: lambda at: Memory(
        outputs=at.has_output, inputs=-(at.has_input and not at.trains), in_flight=at.trains
    ),
    ins.SEND_F: Memory(pending_sends=1),
    ins.FREE_F: lambda at: Memory(pending_sends=-1, outputs=-at.gives_back),
    ins.RECV_B: Memory(grad_buffers=1),
    ins.WAIT_B: Memory(grad_buffers=-1, output_grads=1),
    ins.HAND_B: Memory(input_grads=-1, output_grads=1),
    ins.BACKWARD: _backward,
    ins.INPUT_GRAD: lambda at: _backward(at)._replace(weight_backlog=1),
    ins.WEIGHT_GRAD: Memory(weight_backlog=-1),
    ins.SEND_B: Memory(pending_sends=1),
    ins.FREE_B: Memory(pending_sends=-1, input_grads=-1),
}


def change_of(op: str, site: Site) -> Memory:
    """What ``op`` adds to the memory."""
    feature = feature_of(op)
    change = (_CHANGES if feature is None else feature.changes).get(op, Memory())
    return change(site) if callable(change) else change


class _Column(dict[str, int]):
    """By op, what it adds to one kind of memory in a plan that trains; kept, as searches ask all the time."""

    def __init__(self, name: str) -> None:
        self.kind = KINDS[name]

    def __missing__(self, op: str) -> int:
        change = self[op] = change_of(op, Site())[self.kind]
        return change


IN_FLIGHT, WEIGHT_BACKLOG, ON_HOST = map(_Column, ("in_flight", "weight_backlog", "on_host"))

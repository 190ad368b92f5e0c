"""The ledger of memory: how each instruction changes the memory of a rank. Verification, the simulator, searches,
``advise`` and drawings all count by it.
"""

from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron_pp.feature_table import FEATURES
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.feature import feature_of

_TENSORS = "outputs", "inputs", "act_buffers", "output_grads", "input_grads", "grad_buffers"
_VIEWS = "pending_sends", "in_flight", "weight_backlog", "on_host"
_ADDED = [one for row in FEATURES for one in row.tensors], [one for row in FEATURES for one in row.views]
_NAMES = *_TENSORS, *_ADDED[0], *_VIEWS, *_ADDED[1]
_named: Any = namedtuple  # as Any, because type checkers do not know the names of its fields


class Memory(_named("_Counts", _NAMES, defaults=[0] * len(_NAMES))):  # type: ignore[misc]
    """Live pipeline tensors of one rank, in tensors (one per message, whatever its size).

    outputs        stage outputs that still hold their data
    inputs         received (or handed) activations kept for the backward
    act_buffers    posted receives of activations that were not waited for yet
    output_grads   received (or handed) gradients kept for the backward
    input_grads    input gradients that still hold their data
    grad_buffers   posted receives of gradients that were not waited for yet

    Further counts of the same tensors:

    pending_sends  sends posted and not released (their tensors are among outputs and input_grads)
    in_flight      forwards, each of a chunk and a microbatch or its part, whose backward has not run: what autograd
                   keeps on the device
    weight_backlog input gradients whose W has not run
    on_host        forwards that have a buffer in host memory, to which their activations were copied

    Features add tensors and views of their own (``Row.tensors``, ``Row.views``).
    """

    __slots__ = ()

    @property
    def tensors(self) -> int:
        """Pipeline tensors alive together."""
        return sum(self[:VIEWS])


KINDS = {name: kind for kind, name in enumerate(Memory._fields)}
VIEWS = KINDS["pending_sends"]  # the first that counts no more tensors


class Site(NamedTuple):
    """The facts on which the changes of a stage depend; by default those of a middle stage with neighbours elsewhere.

    has_input   whether a stage before it makes its input
    has_output  whether a stage behind it, or a collective, uses its output
    is_root     whether collectives bring its output to all ranks
    handed_in   whether the stage before it is on the same rank
    handed_on   whether the stage behind it is on the same rank
    gives_back  whether an output's data is freed after its send or hand-off, not by its backward
    trains      whether there are backwards
    barriers    of the placement
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
        """Whether the stage's input is a tensor of its own, and not the output of the stage before."""
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
    # If outputs are freed early, the output's storage becomes the input's. Otherwise its backward frees it.
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
    """The change of memory by ``op``."""
    feature = feature_of(op)
    change = (_CHANGES if feature is None else feature.changes).get(op, Memory())
    return change(site) if callable(change) else change


class _Column(dict[str, int]):
    """Op -> its change of one kind of memory in a training plan. Values are kept: searches look them up often."""

    def __init__(self, name: str) -> None:
        self.kind = KINDS[name]

    def __missing__(self, op: str) -> int:
        change = self[op] = change_of(op, Site())[self.kind]
        return change


IN_FLIGHT, WEIGHT_BACKLOG, ON_HOST = map(_Column, ("in_flight", "weight_backlog", "on_host"))

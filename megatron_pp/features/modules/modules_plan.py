"""The plan of a pipeline of several modules: non-interleaved 1F1B on a graph of ranks (``graph.py``).

Order. A rank runs as many forwards ahead as there are stages behind its own on the longest way, then a forward and a
backward in turn, then the rest of the backwards: Megatron-core's order for such pipelines.

Communication. The logical clock of ``plan/lower/clock.py`` on a graph: every operation takes one slot, a transfer none.
A message's *round* is the end of the operation that made it, which all ranks know. Sends are posted behind their
operation and released ``release_after`` operations later. Receives are posted at the first boundary of the receiver's
order that begins at their round or later. Of a channel the first receive goes out there before all sends, and the first
send of each pair of ranks; the others come in the order of rounds, and of one round by their place on the channel: on
one hardware queue each waits for the one before. Receives are waited for before their use; where shapes vary in that
turn, as a sender's tensor goes out only once its receiver has read the shape, and the next shape on the channel comes
behind that tensor. So whatever a rank waits for at a boundary has a round that is not later than the boundary, and was
posted by a rank whose own boundary of that round lies behind waits of lower turns only: the wait of the lowest turn
always ends. ``verify_modules`` does not rely on it.

A rank's forward is one instruction ``F0.3``, whatever modules it is in. Transfers have the names of edges, as in
``SEND_F0.3:vision_llm_0_2``.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from megatron_pp.errors import PlanError
from megatron_pp.features.modules.graph import Edge, ModuleGraph
from megatron_pp.features.modules.modules_verify import AT_ENDS, verify_modules
from megatron_pp.plan.gc_pause import collector_paused
from megatron_pp.plan.ir.agenda import Agenda
from megatron_pp.plan.ir.dataflow import MOVES
from megatron_pp.plan.ir.instruction import (
    BACKWARD,
    ENABLE_GRAD_SYNC,
    FORWARD,
    GRAD_SYNC,
    Instruction,
    placed,
)
from megatron_pp.plan.ir.placement import LOOP, Placement
from megatron_pp.plan.ir.repeated import Line
from megatron_pp.plan.ir.spec import HOOKS, OVERLAP, Plan, PlanSpec

_Made = tuple[str, int, int]  # an operation: FORWARD or BACKWARD, rank, microbatch


@dataclass(frozen=True, kw_only=True)
class ModulesSpec(PlanSpec):
    """A PlanSpec with one model chunk on each rank of ``graph``. Of the other fields those are read that
    ``modules_spec`` takes."""

    graph: ModuleGraph

    def describe(self) -> str:
        kind = "forward only" if self.forward_only else "training"
        return f"{self.schedule} of several modules on {self.graph}; M={self.num_microbatches} {kind}"


@dataclass(frozen=True, kw_only=True)
class ModulesPlacement(Placement):
    """Stage r is what rank r holds of all its modules."""

    graph: ModuleGraph

    @property
    def rank_edges(self) -> tuple[tuple[int, int], ...]:
        """(source, destination) ranks between which activations travel, or gradients the other way, sorted."""
        forth = {(edge.source, edge.target) for edge in self.graph.activations}
        return tuple(sorted(forth | {(edge.target, edge.source) for edge in self.graph.gradients}))


def modules_spec(
    graph: ModuleGraph,
    num_microbatches: int,
    *,
    forward_only: bool = False,
    variable_shapes: bool = False,
    release_after: int = 1,
    grad_sync: str = HOOKS,
    device: tuple[str, ...] = (),
) -> ModulesSpec:
    """The spec of a step of ``num_microbatches`` on ``graph``; the other fields are as in PlanSpec."""
    return ModulesSpec(
        "1f1b",
        graph.size,
        1,
        num_microbatches,
        policy=OVERLAP,
        forward_only=forward_only,
        variable_shapes=variable_shapes,
        release_after=release_after,
        grad_sync=grad_sync,
        device=device,
        graph=graph,
    )


@lru_cache(maxsize=16)
def modules_plan(spec: ModulesSpec) -> Plan:
    """The plan of ``spec``, verified. The same spec gives the same object. Raises PlanError where modules wait for each
    other in a circle."""
    plan = lowered_modules(spec)
    return replace(plan, proof=verify_modules(plan).certificate)


@collector_paused()
def lowered_modules(spec: ModulesSpec) -> Plan:
    """The plan before it is verified."""
    orders = [_order(spec, rank) for rank in range(spec.graph.size)]
    ends = _ends(spec.graph, orders)
    made = {
        (at.op, rank, at.mb): end
        for rank, order in enumerate(orders)
        for at, end in zip(order, ends[rank], strict=True)
    }
    programs = tuple(_Lowering(spec, rank, orders[rank], ends[rank], made).program() for rank in range(len(orders)))
    placement = ModulesPlacement(LOOP, spec.graph.size, 1, graph=spec.graph)
    return Plan(spec, placement, programs, tuple(orders))


def _order(spec: ModulesSpec, rank: int) -> Line:
    """Non-interleaved 1F1B (arXiv 2006.09503), with the stages of the longest way."""
    graph, count = spec.graph, spec.num_microbatches
    forwards, backwards = ([placed(op, rank, mb, -1, 0) for mb in range(count)] for op in (FORWARD, BACKWARD))
    if spec.forward_only:
        return tuple(forwards)
    ahead = min(graph.stages - graph.depths[rank] - 1, count)
    steady = [at for both in zip(forwards[ahead:], backwards[: count - ahead], strict=True) for at in both]
    return (*forwards[:ahead], *steady, *backwards[count - ahead :])


def _ends(graph: ModuleGraph, orders: Sequence[Line]) -> list[list[int]]:
    """The slot in which each operation ends, from 1. Raises PlanError where ranks wait for each other in a circle."""
    ends: list[list[int]] = [[] for _ in orders]
    made: dict[_Made, int] = {}
    waiting: defaultdict[_Made, list[int]] = defaultdict(list)
    agenda = Agenda(range(len(orders)))

    def advance(rank: int, _: float) -> None:
        order, own = orders[rank], ends[rank]
        for at in order[len(own) :]:
            needed = [(at.op, edge.source, at.mb) for edge in graph.edges[at.op][rank].received]
            missing = next((one for one in needed if one not in made), None)
            if missing is not None:
                waiting[missing].append(rank)
                return
            begin = max([made[one] for one in needed] + own[-1:], default=0)
            own.append(begin + 1)
            made[(at.op, rank, at.mb)] = begin + 1
            for other in waiting.pop((at.op, rank, at.mb), ()):
                agenda.plan(other, 0)

    agenda.run(advance)
    for one, ranks in waiting.items():
        op, source, mb = one
        raise PlanError(
            f"rank {graph.members[ranks[0]]} waits for {op}0.{mb} of rank {graph.members[source]}, which never comes: "
            "the modules of these ranks wait for each other in a circle"
        )
    return ends


def _places(edges: Sequence[Edge]) -> Iterator[tuple[int, Edge]]:
    """Each edge with its place among those of the same two ranks."""
    seen: Counter[tuple[int, int]] = Counter()
    for edge in edges:
        yield seen[edge[1:3]], edge
        seen[edge[1:3]] += 1


class _Post(NamedTuple):
    """A send, or a receive and its wait; sorted as both ends of a channel agree: by round and place.

    place  of its edge among those of one rank with one other; the first one's may go ahead of its turn
    """

    round: int
    place: int
    post: Instruction
    wait: Instruction | None = None


def _turn(one: _Post) -> tuple[int, int]:
    return one.round, one.place


class _Lowering:
    """Lays out one rank's program on the boundaries of its order: boundary i is before entry i."""

    def __init__(self, spec: ModulesSpec, rank: int, order: Line, ends: Sequence[int], made: dict[_Made, int]) -> None:
        self.spec, self.rank, self.order, self.ends, self.made = spec, rank, order, ends, made
        self.edges = {op: spec.graph.edges[op][rank] for op in (FORWARD, BACKWARD)}
        # By boundary:
        self.sends: defaultdict[int, list[_Post]] = defaultdict(list)
        self.receives: defaultdict[int, list[_Post]] = defaultdict(list)
        self.releases: defaultdict[int, list[Instruction]] = defaultdict(list)
        self.waits: defaultdict[int, list[Instruction]] = defaultdict(list)

    def program(self) -> Line:
        for i, at in enumerate(self.order):
            self._place(i, at)
        syncs = dict(self._syncs())
        made: list[Instruction] = []
        for i in range(len(self.order) + 1):
            made += self._boundary(i)
            if i in syncs:
                made.append(syncs[i])
            made += self.order[i : i + 1]
        return tuple(made)

    def _place(self, i: int, at: Instruction) -> None:
        moves, (received, sent), ends = MOVES[at.op], self.edges[at.op], self.ends
        released = min(i + 1 + self.spec.release_after, len(self.order))
        for place, edge in _places(sent):
            self.sends[i + 1].append(_Post(ends[i], place, self._transfer(moves.send, at, edge)))
            self.releases[released].append(self._transfer(moves.free, at, edge))
        for place, edge in _places(received):
            round_ = self.made[(at.op, edge.source, at.mb)]
            due = next(k for k in range(i, -1, -1) if k == 0 or ends[k - 1] - 1 < round_)
            wait = self._transfer(moves.wait, at, edge)
            self.receives[due].append(_Post(round_, place, self._transfer(moves.recv, at, edge), wait))
            if not self.spec.variable_shapes:
                self.waits[i].append(wait)

    def _transfer(self, op: str, at: Instruction, edge: Edge) -> Instruction:
        sends = edge.source == self.rank
        stage = AT_ENDS[at.op][0 if sends else 1]
        return placed(op, stage, at.mb, edge.target if sends else edge.source, 0, tensor=edge.name)

    def _boundary(self, i: int) -> Iterator[Instruction]:
        sends, receives = self.sends[i], sorted(self.receives[i], key=_turn)
        first = {(one.post.op, one.post.peer): one for one in reversed(receives)}  # of each channel
        ahead = [*first.values(), *(one for one in sends if not one.place)]
        yield from (one.post for one in ahead)
        for _, same in groupby(sorted((*receives, *sends), key=_turn), key=_turn):
            together = list(same)
            yield from (one.post for one in together if one not in ahead)
            if self.spec.variable_shapes:
                yield from (one.wait for one in together if one.wait is not None)
        yield from self.releases[i]
        yield from self.waits[i]

    def _syncs(self) -> Iterator[tuple[int, Instruction]]:
        """The boundary of the gradient sync: before the last backward, or after it where the config has a function for
        it, which Megatron calls on all ranks but those of first stages."""
        if self.spec.forward_only:
            return
        hooks = self.spec.grad_sync == HOOKS or self.spec.graph.leading[self.rank]
        op, boundary = (ENABLE_GRAD_SYNC, len(self.order) - 1) if hooks else (GRAD_SYNC, len(self.order))
        yield boundary, Instruction(op, self.rank)

"""The plan of a pipeline of several modules on a graph of ranks (``graph.py``).

Order. A rank runs as many forwards ahead as there are stages behind its own on the longest way. Then it alternates
forwards and backwards, and then runs the remaining backwards. This is Megatron-core's order for such pipelines. If
ranks have several chunks, orders are searched for the times of the modules (``graph_orders.py``), so that encoders run
in the bubbles of the language model (Optimus, arXiv 2408.03505; BigMac, arXiv 2605.25451).

Communication. The logical clock is that of ``plan/lower/clock.py``, on a graph. An operation takes one slot; if orders
are searched it takes its module's time, unless that would deadlock. A transfer takes no time. A message's *round* is
the end of the operation that made it, which all ranks know. A send is posted behind its operation and released
``release_after`` operations later, once the clock has the receive posted. A receive is posted at the first boundary of
the receiver's order that is not before the message's round. At a boundary the first receive of a channel goes out
before all sends, and then the first send of each pair of ranks. The others come in the order of rounds, and within a
round by their place on the channel, because on one hardware queue each waits for the one before it. The wait for a
receive is before its use. If shapes vary, waits come in the order of posts: a sender's tensor goes out only once its
receiver has read the shape, and the next shape on the channel comes behind that tensor.

So everything for which a rank waits at a boundary has a round that is not later than the boundary. It was posted by a
rank whose own boundary of that round is behind waits of lower turns only. So the wait of the lowest turn always ends.
``verify_modules`` does not rely on this argument.

If any instruction may wait for an idle device (ANY_WAIT), every operation takes one slot, and all posts of a boundary
go out in an order that is the same on all ranks: by round, place, source and target (``plan/lower/turns.py`` says why
that cannot hang). If shapes vary too, the messages of one round are one grouped call.

A chunk's forward is one instruction ``F0.3``, whatever modules it holds. Transfers have chunk 0 and the names of
edges, as in ``SEND_F0.3:vision_llm_0_2``.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, product
from typing import Any, NamedTuple

from megatron_pp.common.gc_pause import collector_paused
from megatron_pp.errors import PlanError
from megatron_pp.features.modules.graph import ModuleGraph
from megatron_pp.features.modules.graph_orders import GraphOrders, Node, Row
from megatron_pp.features.modules.modules_verify import transfer, verify_modules
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.ir.agenda import Agenda
from megatron_pp.plan.ir.dataflow import MOVES
from megatron_pp.plan.ir.instruction import (
    BACKWARD,
    ENABLE_GRAD_SYNC,
    FORWARD,
    GRAD_SYNC,
    Instruction,
    batch,
    placed,
)
from megatron_pp.plan.ir.placement import LOOP, Placement
from megatron_pp.plan.ir.repeated import Line
from megatron_pp.plan.ir.spec import HOOKS, OVERLAP, Plan, PlanSpec

_Made = tuple[str, int, int, int]  # an operation: FORWARD or BACKWARD, rank, chunk, microbatch


@dataclass(frozen=True, kw_only=True)
class ModulesSpec(PlanSpec):
    """A PlanSpec with the chunks of ``graph`` on its ranks. Of the other fields only those that ``modules_spec`` takes
    are read."""

    graph: ModuleGraph

    @property
    def placement(self) -> "ModulesPlacement":
        return ModulesPlacement(LOOP, self.pipeline_size, self.num_chunks, graph=self.graph)

    def describe(self) -> str:
        kind = "forward only" if self.forward_only else "training"
        order = self.schedule if self.num_chunks == 1 else "searched order"
        return f"{order} of several modules on {self.graph}; M={self.num_microbatches} {kind}"


@dataclass(frozen=True, kw_only=True)
class ModulesPlacement(Placement):
    """Stage ``c * P + r`` is chunk c of rank r."""

    graph: ModuleGraph

    @property
    def rank_chunks(self) -> list[int]:
        """For each rank the number of its chunks."""
        return [len(chunks) for chunks in self.graph.chunks]

    @property
    def rank_edges(self) -> tuple[tuple[int, int], ...]:
        """(source, destination) ranks between which activations travel, or gradients the other way, sorted."""
        forth = {(edge.source, edge.target) for edge in self.graph.activations if edge.travels}
        return tuple(sorted(forth | {(edge.target, edge.source) for edge in self.graph.gradients if edge.travels}))


def modules_spec(graph: ModuleGraph, num_microbatches: int, **fields: Any) -> ModulesSpec:
    """The spec of a step of ``num_microbatches`` on ``graph``. ``fields``: ``forward_only``, ``variable_shapes``,
    ``release_after``, ``grad_sync`` and ``device`` as in PlanSpec; plans of modules have no other."""
    return ModulesSpec("1f1b", graph.size, graph.num_chunks, num_microbatches, policy=OVERLAP, graph=graph, **fields)


def costs_of_modules(graph: ModuleGraph) -> StageCosts:
    """The times of the modules as costs of stages. Backwards are two equal halves."""
    of = {(k, rank): chunk.times for rank, chunks in enumerate(graph.chunks) for k, chunk in enumerate(chunks)}
    stages = product(range(graph.num_chunks), range(graph.size))
    forward, backward = zip(*(of.get(stage, (0.0, 0.0)) for stage in stages), strict=True)
    halves = [time / 2 for time in backward]
    return StageCosts.per_stage(forward, halves, halves)


@lru_cache(maxsize=16)
def modules_plan(spec: ModulesSpec) -> Plan:
    """The verified plan of ``spec``. The same spec gives the same object. Raises PlanError if modules wait for each
    other in a circle."""
    plan = lowered_modules(spec)
    return replace(plan, proof=verify_modules(plan).certificate)


@collector_paused()
def lowered_modules(spec: ModulesSpec, orders: Sequence[Line] = ()) -> Plan:
    """The plan before it is verified. ``orders``: its orders, if they are given."""
    orders = orders or _orders(spec)
    if spec.num_chunks > 1 and not spec.may_wait:
        plan = _lowered(spec, orders, in_slots=False)
        with suppress(PlanError):
            verify_modules(plan)
            return plan
        # If a queue or the device makes ranks wait for others at boundaries, slots of one length align the boundaries.
    return _lowered(spec, orders, in_slots=True)


def _lowered(spec: ModulesSpec, orders: Sequence[Line], in_slots: bool) -> Plan:
    clock = _clock(spec.graph, orders, in_slots)
    places = _places(spec.graph)
    programs = tuple(_Lowering(spec, rank, order, clock, places).program() for rank, order in enumerate(orders))
    return Plan(spec, spec.placement, programs, tuple(orders))


def _orders(spec: ModulesSpec) -> list[Line]:
    graph = spec.graph
    size = spec.graph.size
    if graph.num_chunks == 1:
        return [_order(spec, rank) for rank in range(size)]
    try:
        found = _searched(spec, _together(graph))
    except PlanError:  # one of them needs another's result of the same chunk
        found = _searched(spec, list(range(size)))
    orders = [tuple(placed(op, k * size + rank, mb, -1, k) for op, k, mb in row) for rank, row in enumerate(found)]
    _check_peers(graph, orders)
    return orders


def _together(graph: ModuleGraph) -> list[int]:
    """For each rank the number of its group: its tensor-parallel peers in any module, the peers of these, and so on.
    All ranks of a group run in the same order, so that their collectives meet."""
    leads = list(range(graph.size))
    for _, stage in _stages_of(graph):
        lowest = min(leads[rank] for rank in stage)
        joined = {leads[rank] for rank in stage}
        leads = [lowest if lead in joined else lead for lead in leads]
    numbers = {lead: number for number, lead in enumerate(sorted(set(leads)))}
    return [numbers[lead] for lead in leads]


def _stages_of(graph: ModuleGraph) -> Iterator[tuple[str, list[int]]]:
    """The module and the tensor-parallel ranks of each stage."""
    place = {rank: k for k, rank in enumerate(graph.members)}
    for module in graph.modules:
        yield from ((module.name, [place[rank] for rank in stage]) for replica in module.ranks for stage in replica)


def _searched(spec: ModulesSpec, groups: Sequence[int]) -> list[Row]:
    """The order of each rank; ranks of one group have the same order. ``groups``: for each rank the number of its
    group. Raises PlanError if groups need each other's results in a circle."""
    graph = spec.graph
    number = {module.name: module.chunk for module in spec.graph.modules}
    own = [[number[chunk.modules[0]] for chunk in chunks] for chunks in graph.chunks]
    every = [
        sorted({n for rank, group in enumerate(groups) if group == at for n in own[rank]}) for at in range(graph.size)
    ]

    def node_of(rank: int, k: int) -> Node:
        return groups[rank], every[groups[rank]].index(own[rank][k])

    times: dict[Node, tuple[float, float]] = {}
    needs: dict[str, dict[Node, list[Node]]] = {FORWARD: {}, BACKWARD: {}}
    for rank, chunks in enumerate(graph.chunks):
        for k, chunk in enumerate(chunks):
            node = node_of(rank, k)
            before = times.get(node, (0.0, 0.0))
            times[node] = max(before[0], chunk.times[0]), max(before[1], chunk.times[1])
            for op, of_nodes in needs.items():
                sources = [node_of(edge.source, edge.chunks[0]) for edge in graph.edges[op][rank][k].received]
                of_nodes[node] = list(dict.fromkeys([*of_nodes.get(node, ()), *sources]))
    fed = {node_of(edge.target, edge.chunks[1]) for edge in graph.activations if edge.bridge}
    rows = GraphOrders(times, needs, spec.num_microbatches, fed, spec.forward_only).best()
    found: list[Row] = []
    for rank, group in enumerate(groups):
        at = [(op, every[group][j], mb) for op, j, mb in rows[group]]
        found.append(tuple((op, own[rank].index(n), mb) for op, n, mb in at if n in own[rank]))
    return found


def _check_peers(graph: ModuleGraph, orders: Sequence[Line]) -> None:
    """Raises PlanError if tensor-parallel peers would run a module in different orders."""
    for name, ranks in _stages_of(graph):
        rows = [
            [(at.op, at.mb) for at in orders[rank] if name in graph.chunks[rank][at.chunk].modules] for rank in ranks
        ]
        if any(row != rows[0] for row in rows):
            stage = ", ".join(str(graph.members[rank]) for rank in ranks)
            raise PlanError(
                f"ranks {stage} are tensor-parallel in {name}, and no order is found in which they run it alike: a "
                "module has several stages on ranks that are tensor-parallel in another one; put these stages on other "
                "ranks"
            )


def _order(spec: ModulesSpec, rank: int) -> Line:
    """The order of non-interleaved 1F1B (arXiv 2006.09503), with the number of stages on the longest way."""
    graph = spec.graph
    count = spec.num_microbatches
    forwards, backwards = ([placed(op, rank, mb, -1, 0) for mb in range(count)] for op in (FORWARD, BACKWARD))
    if spec.forward_only:
        return tuple(forwards)
    ahead = min(graph.stages - graph.depths[rank] - 1, count)
    steady = [at for both in zip(forwards[ahead:], backwards[: count - ahead], strict=True) for at in both]
    return (*forwards[:ahead], *steady, *backwards[count - ahead :])


class _Span(NamedTuple):
    begin: float
    end: float


class _NodeTimes(NamedTuple):
    """For each rank the spans of its operations; the end of each operation; and the time of the longest one."""

    spans: list[list[_Span]]
    made: dict[_Made, float]
    longest: float


def _clock(graph: ModuleGraph, orders: Sequence[Line], in_slots: bool) -> _NodeTimes:
    """The times of all operations. Raises PlanError if ranks wait for each other in a circle."""
    spans: list[list[_Span]] = [[] for _ in orders]
    made: dict[_Made, float] = {}
    waiting: defaultdict[_Made, list[int]] = defaultdict(list)
    agenda = Agenda(range(len(orders)))

    def advance(rank: int, _: float) -> None:
        own = spans[rank]
        for at in orders[rank][len(own) :]:
            received = graph.edges[at.op][rank][at.chunk].received
            needed = [(at.op, edge.source, edge.chunks[0], at.mb) for edge in received]
            missing = next((one for one in needed if one not in made), None)
            if missing is not None:
                waiting[missing].append(rank)
                return
            begin = max([own[-1].end if own else 0.0, *(made[one] for one in needed)])
            end = begin + (1.0 if in_slots else graph.chunks[rank][at.chunk].times[at.op == BACKWARD])
            own.append(_Span(begin, end))
            made[(at.op, rank, at.chunk, at.mb)] = end
            for other in waiting.pop((at.op, rank, at.chunk, at.mb), ()):
                agenda.plan(other, 0)

    agenda.run(advance)
    for (op, source, chunk, mb), ranks in waiting.items():
        raise PlanError(
            f"rank {graph.members[ranks[0]]} waits for {op}{chunk}.{mb} of rank {graph.members[source]}, which never "
            "comes: the modules of these ranks wait for each other in a circle"
        )
    return _NodeTimes(spans, made, max((span.end - span.begin for own in spans for span in own), default=0.0))


def _places(graph: ModuleGraph) -> dict[str, int]:
    """Name of an edge -> its place among the edges of one chunk to one rank."""
    places: dict[str, int] = {}
    for edges in (graph.activations, graph.gradients):
        seen: Counter[tuple[int, int, int]] = Counter()
        for edge in edges:
            ends = edge.source, edge.chunks[0], edge.target
            places[edge.name] = seen[ends]
            seen[ends] += 1
    return places


class _Post(NamedTuple):
    """A send, or a receive and its wait. Sorting is by round and place, which is the same at both ends of a channel.

    place  of its edge among those of one rank with one other; the first one's may go ahead of its turn
    ends   source and target ranks
    """

    round: float
    place: int
    ends: tuple[int, int]
    post: Instruction
    wait: Instruction | None = None


def _turn(one: _Post) -> tuple[float, int]:
    return one.round, one.place


def _in_turn(one: _Post) -> tuple[float, int, tuple[int, int]]:
    return one.round, one.place, one.ends


class _Lowering:
    """Lays out one rank's program on the boundaries of its order: boundary i is before entry i."""

    def __init__(self, spec: ModulesSpec, rank: int, order: Line, clock: _NodeTimes, places: Mapping[str, int]) -> None:
        self.spec = spec
        self.rank = rank
        self.order = order
        self.clock = clock
        self.places = places
        self.spans = clock.spans[rank]
        self.edges = {op: spec.graph.edges[op][rank] for op in (FORWARD, BACKWARD)}  # op -> for each chunk its edges
        # Tables with a boundary as their key:
        self.sends: defaultdict[int, list[_Post]] = defaultdict(list)
        self.receives: defaultdict[int, list[_Post]] = defaultdict(list)
        self.releases: defaultdict[int, list[Instruction]] = defaultdict(list)
        self.waits: defaultdict[int, list[Instruction]] = defaultdict(list)

    def program(self) -> Line:
        for i, at in enumerate(self.order):
            self._place(i, at)
        syncs = defaultdict(list)
        for boundary, sync in self._syncs():
            syncs[boundary].append(sync)
        made: list[Instruction] = []
        for i in range(len(self.order) + 1):
            made += self._boundary(i)
            made += syncs[i]
            made += self.order[i : i + 1]
        return tuple(made)

    def _place(self, entry: int, at: Instruction) -> None:
        moves = MOVES[at.op]
        edges = self.edges[at.op][at.chunk]
        spans = self.spans
        released = self._released(entry)
        for edge in edges.leaving:
            post = transfer(moves.send, edge, at.mb, self.rank)
            ends = edge.source, edge.target
            self.sends[entry + 1].append(_Post(spans[entry].end, self.places[edge.name], ends, post))
            self.releases[released].append(transfer(moves.free, edge, at.mb, self.rank))
        for edge in edges.arriving:
            round_ = self.clock.made[(at.op, edge.source, edge.chunks[0], at.mb)]
            due = next(k for k in range(entry, -1, -1) if k == 0 or spans[k - 1].begin < round_)
            post, wait = (transfer(op, edge, at.mb, self.rank) for op in (moves.recv, moves.wait))
            ends = edge.source, edge.target
            self.receives[due].append(_Post(round_, self.places[edge.name], ends, post, wait))
            if not self.spec.variable_shapes or self.spec.grouped:
                self.waits[entry].append(wait)

    def _released(self, entry: int) -> int:
        """The boundary at which the result of ``entry`` is released. By then the receiver has posted its receive, which
        takes no longer than the longest operation."""
        posted = self.spans[entry].end + self.clock.longest
        later = range(entry + 1 + self.spec.release_after, len(self.order))
        return next((k for k in later if self.spans[k - 1].end >= posted), len(self.order))

    def _boundary(self, boundary: int) -> Iterator[Instruction]:
        yield from self._posts_in_turn(boundary) if self.spec.may_wait else self._posts(boundary)
        yield from self.releases[boundary]
        yield from self.waits[boundary]

    def _posts_in_turn(self, boundary: int) -> Iterator[Instruction]:
        posts = sorted((*self.sends[boundary], *self.receives[boundary]), key=_in_turn)
        if not self.spec.grouped:
            yield from (one.post for one in posts)
            return
        for _, same in groupby(posts, key=lambda one: one.round):
            yield batch(one.post for one in same)

    def _posts(self, boundary: int) -> Iterator[Instruction]:
        sends = self.sends[boundary]
        receives = sorted(self.receives[boundary], key=_turn)
        first = {(one.post.op, one.post.peer): one for one in reversed(receives)}  # channel -> its first receive
        ahead = [*first.values(), *(one for one in sends if not one.place)]
        yield from (one.post for one in ahead)
        for _, same in groupby(sorted((*receives, *sends), key=_turn), key=_turn):
            together = list(same)
            yield from (one.post for one in together if one not in ahead)
            if self.spec.variable_shapes:
                yield from (one.wait for one in together if one.wait is not None)

    def _syncs(self) -> Iterator[tuple[int, Instruction]]:
        """The boundaries of the gradient syncs: before a chunk's last backward, or behind all backwards if the config
        has a function for it, which Megatron calls on all ranks except those of first stages."""
        if self.spec.forward_only:
            return
        hooks = self.spec.grad_sync == HOOKS or self.spec.graph.leading[self.rank]
        last = {at.chunk: (i, at) for i, at in enumerate(self.order) if at.op == BACKWARD}
        for chunk, (i, at) in sorted(last.items()):
            op, boundary = (ENABLE_GRAD_SYNC, i) if hooks else (GRAD_SYNC, len(self.order))
            yield boundary, Instruction(op, at.stage, chunk=chunk)

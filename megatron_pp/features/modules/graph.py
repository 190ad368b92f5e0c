"""Several modules, each a line of stages on its own ranks, as one graph of ranks and the messages between them.

Every rank runs a forward and a backward of each microbatch, of all modules that it is in, or of each of its chunks.
Within a module a stage sends to the next one, as in any pipeline. A *bridge* carries the output of a module's last
stage to the first stage of another one. Where their data-parallel sizes differ, the larger is a multiple of the
smaller: with fewer replicas behind the bridge a receiver concatenates a part of each of its senders (fan-in), with
more a sender cuts its tensor into a part for each of its receivers (fan-out). Of a tensor-parallel group one rank, its
leader, sends, and all ranks receive: the last one of a source's last stage, the first one of a destination's first
stage (Megatron-core's ``BridgeCommunicator``, whose leaders broadcast what they received).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import isfinite
from typing import NamedTuple

from megatron_pp.errors import PlanError
from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD


class Module(NamedTuple):
    """One module and its ranks.

    ranks  by replica and stage: the tensor-parallel ranks of a stage, of the whole job
    chunk  modules of one number run in one forward where they share a rank. Those of several numbers are model chunks
           of the rank, in the order of their numbers, and run in the bubbles of each other.
    times  of one stage's forward and backward of a microbatch, in any unit; the orders of chunks are searched for them
    """

    name: str
    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    chunk: int = 0
    times: tuple[float, float] = (1.0, 2.0)

    @property
    def stages(self) -> int:
        return len(self.ranks[0])


class Edge(NamedTuple):
    """Messages from one rank to another, or from chunk to chunk of one rank, one for each microbatch.

    name            of its messages, which no other edge has
    source, target  ranks of the graph
    module          the module whose output, or whose output's gradient, it carries
    bridge          the module at the other end of a bridge; empty within a module
    part            (i, n): the i-th of n parts of the sender's tensor, along its batch dimension
    place           (i, n): the i-th of n parts of the receiver's tensor
    chunks          of the source and of the target
    """

    name: str
    source: int
    target: int
    module: str
    bridge: str = ""
    part: tuple[int, int] = (0, 1)
    place: tuple[int, int] = (0, 1)
    chunks: tuple[int, int] = (0, 0)

    @property
    def travels(self) -> bool:
        """Whether between ranks."""
        return self.source != self.target


class ChunkEdges(NamedTuple):
    """Of one chunk: what it receives and sends, in the order of the graph."""

    received: tuple[Edge, ...]
    sent: tuple[Edge, ...]


class Chunk(NamedTuple):
    """What a rank runs in one forward: the names of its modules, and how long a forward and a backward take."""

    modules: tuple[str, ...]
    times: tuple[float, float]


@dataclass(frozen=True)
class ModuleGraph:
    """Ranks that depend on each other, and no others.

    members      their ranks in the whole job, sorted; everything else counts ranks from 0 in this order
    activations  the edges of activations, in the order in which both ends of a channel post messages of one round
    gradients    the edges of gradients
    depths       of each rank: stages before its own, along the longest way through the modules to its first one
    stages       along the longest way through all modules
    leading      of each rank: whether it is the first stage of all its modules
    chunks       of each rank
    """

    members: tuple[int, ...]
    activations: tuple[Edge, ...]
    gradients: tuple[Edge, ...]
    depths: tuple[int, ...]
    stages: int
    leading: tuple[bool, ...]
    chunks: tuple[tuple[Chunk, ...], ...]

    @property
    def num_chunks(self) -> int:
        """Of the rank that has most."""
        return max(map(len, self.chunks))

    @property
    def size(self) -> int:
        return len(self.members)

    @cached_property
    def edges(self) -> Mapping[str, tuple[tuple[ChunkEdges, ...], ...]]:
        """By FORWARD and BACKWARD: the edges of each rank's chunks."""
        return {FORWARD: self._of_ranks(self.activations), BACKWARD: self._of_ranks(self.gradients)}

    def _of_ranks(self, edges: Sequence[Edge]) -> tuple[tuple[ChunkEdges, ...], ...]:
        def of_chunk(rank: int, chunk: int) -> ChunkEdges:
            received = (edge for edge in edges if (edge.target, edge.chunks[1]) == (rank, chunk))
            sent = (edge for edge in edges if (edge.source, edge.chunks[0]) == (rank, chunk))
            return ChunkEdges(tuple(received), tuple(sent))

        return tuple(
            tuple(of_chunk(rank, chunk) for chunk in range(len(chunks))) for rank, chunks in enumerate(self.chunks)
        )

    def __str__(self) -> str:
        ways = [f"{edge.module} {self.members[edge.source]}>{self.members[edge.target]}" for edge in self.activations]
        return f"ranks {', '.join(map(str, self.members))}: {', '.join(ways)}"


def module_graphs(modules: Sequence[Module], topology: Mapping[str, Sequence[str]]) -> list[ModuleGraph]:
    """The graphs of ``modules``, one for each set of ranks that depend on each other: data-parallel replicas do not.
    ``topology``: by module, those that its output goes to. Sorted by ranks.

    Raises PlanError for a topology with a circle or an unknown module, for data-parallel sizes of which neither is a
    multiple of the other, and for two modules that a bridge joins on one rank in one chunk.
    """
    known = {module.name: module for module in modules}
    _check(known, topology)
    before = {name: [source for source in known if name in topology.get(source, ())] for name in known}
    longest = {name: _stages_before(name, before, known, ()) for name in known}
    activations, gradients = _edges(modules, topology, known)
    depths: dict[int, int] = {}
    leading: dict[int, bool] = {}
    for module in modules:
        for stage, ranks in ((k, ranks) for replica in module.ranks for k, ranks in enumerate(replica)):
            for rank in ranks:
                depths.setdefault(rank, longest[module.name] + stage)
                leading[rank] = leading.get(rank, True) and stage == 0
    total = max(longest[name] + module.stages for name, module in known.items())
    chunks = {rank: _chunks_of(rank, modules) for rank in depths}
    graphs = []
    for members in _components(depths, [*activations, *gradients]):
        number = {rank: at for at, rank in enumerate(members)}
        forth, back = (
            tuple(_renumbered(edge, number, chunks, back) for edge in edges if edge.source in number)
            for edges, back in ((activations, False), (gradients, True))
        )
        of_ranks = tuple(depths[rank] for rank in members), total, tuple(leading[rank] for rank in members)
        graphs.append(ModuleGraph(tuple(members), forth, back, *of_ranks, tuple(chunks[rank] for rank in members)))
    return graphs


def _chunks_of(rank: int, modules: Sequence[Module]) -> tuple[Chunk, ...]:
    own = [module for module in modules if any(rank in stage for replica in module.ranks for stage in replica)]
    made = []
    for number in sorted({module.chunk for module in own}):
        together = [module for module in own if module.chunk == number]
        forward, backward = (sum(module.times[k] for module in together) for k in (0, 1))
        made.append(Chunk(tuple(module.name for module in together), (forward, backward)))
    return tuple(made)


def _check(known: Mapping[str, Module], topology: Mapping[str, Sequence[str]]) -> None:
    for source, targets in topology.items():
        for name in (source, *targets):
            if name not in known:
                raise PlanError(f"the topology names a module {name!r}; there are {', '.join(known)}")
    for name, module in known.items():
        if not module.ranks or len({len(replica) for replica in module.ranks}) != 1 or not module.stages:
            raise PlanError(f"module {name} needs replicas of one number of stages, at least 1")
        if min(module.times) <= 0 or not all(map(isfinite, module.times)):
            raise PlanError(f"module {name} has times {module.times}; they must be finite and above 0")


def _stages_before(
    name: str, before: Mapping[str, Sequence[str]], known: Mapping[str, Module], way: tuple[str, ...]
) -> int:
    if name in way:
        raise PlanError(f"the modules' outputs go in a circle: {' > '.join((*reversed(way), way[-1]))}")
    further = (*way, name)
    return max((_stages_before(one, before, known, further) + known[one].stages for one in before[name]), default=0)


def _edges(
    modules: Sequence[Module], topology: Mapping[str, Sequence[str]], known: Mapping[str, Module]
) -> tuple[list[Edge], list[Edge]]:
    """The edges of activations and of gradients, between ranks of the whole job."""
    activations: list[Edge] = []
    gradients: list[Edge] = []
    for module in modules:
        for before, after in _neighbours(module):
            activations.append(_edge(before, after, module.name))
            gradients.append(_edge(after, before, module.name))
    for source in modules:
        for name in topology.get(source.name, ()):
            for forth, back in _bridges(source, known[name]):
                activations += forth
                gradients += back
    for edges in (activations, gradients):
        if len({edge.name for edge in edges}) < len(edges):
            raise PlanError(f"modules {', '.join(known)}: names of messages are made of theirs, and two are equal")
    return activations, gradients


def _neighbours(module: Module) -> Iterator[tuple[int, int]]:
    for replica in module.ranks:
        for stage, following in pairwise(replica):
            yield from zip(stage, following, strict=True)


def _bridges(source: Module, target: Module) -> Iterator[tuple[list[Edge], list[Edge]]]:
    """For each pair of replicas that exchange something: its edges of activations and of gradients."""
    names, several = (source.name, target.name), (len(source.ranks), len(target.ranks))
    larger, smaller = max(several), min(several)
    if larger % smaller:
        raise PlanError(
            f"module {source.name} has {several[0]} data-parallel replicas and {target.name}, which takes its output, "
            f"{several[1]}; one must be a multiple of the other"
        )
    parts = larger // smaller
    for k in range(larger):
        fans_in = several[0] == larger
        sender, receiver = (k, k // parts) if fans_in else (k // parts, k)
        one_of = (k % parts, parts)
        part, place = ((0, 1), one_of) if fans_in else (one_of, (0, 1))
        senders, receivers = source.ranks[sender][-1], target.ranks[receiver][0]
        if source.chunk == target.chunk and (shared := sorted({*senders} & {*receivers})):
            raise PlanError(f"rank {shared[0]} has the last stage of {names[0]} and the first of {names[1]}, its next")
        forth = [_edge(senders[-1], rank, *names, part, place) for rank in receivers]
        back = [_edge(receivers[0], rank, *names, place, part) for rank in senders]
        yield forth, back


def _edge(
    source: int,
    target: int,
    module: str,
    bridge: str = "",
    part: tuple[int, int] = (0, 1),
    place: tuple[int, int] = (0, 1),
) -> Edge:
    words = (module, bridge, str(source), str(target)) if bridge else (module, str(source), str(target))
    return Edge(re.sub(r"\W", "_", "_".join(words)), source, target, module, bridge, part, place)


def _renumbered(edge: Edge, number: Mapping[int, int], chunks: Mapping[int, Sequence[Chunk]], back: bool) -> Edge:
    ends = (edge.source, edge.module), (edge.target, edge.bridge or edge.module)
    if back:
        ends = (edge.source, edge.bridge or edge.module), (edge.target, edge.module)
    source, target = (
        next(k for k, chunk in enumerate(chunks[rank]) if module in chunk.modules) for rank, module in ends
    )
    return edge._replace(source=number[edge.source], target=number[edge.target], chunks=(source, target))


def _components(ranks: Mapping[int, int], edges: Sequence[Edge]) -> list[list[int]]:
    """The ranks that edges join, sorted; sorted by their first."""
    joined = {rank: {rank} for rank in ranks}
    for edge in edges:
        both = joined[edge.source] | joined[edge.target]
        if len(both) > len(joined[edge.source]):
            for rank in both:
                joined[rank] = both
    return sorted(sorted(one) for one in {id(found): found for found in joined.values()}.values())

"""Several modules, each a line of stages on its own ranks, as one graph of ranks and the messages between them.

A rank runs a forward and a backward of each microbatch for all its modules together, or for each of its chunks. Within
a module a stage sends to the next one, as in any pipeline. A *bridge* carries the output of a module's last stage to
the first stage of another module. If their data-parallel sizes differ, the larger is a multiple of the smaller. With
fewer replicas behind the bridge a receiver concatenates the parts of its senders (fan-in). With more, a sender cuts its
tensor into a part for each of its receivers (fan-out). One rank of a tensor-parallel group, its leader, sends, and all
ranks receive. The leader is the last rank of a source's last stage, and the first rank of a destination's first stage
(as in Megatron-core's ``BridgeCommunicator``, whose leaders broadcast what they received).
"""

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import chain, pairwise
from math import isfinite
from typing import Any, NamedTuple

from megatron_pp.errors import PlanError
from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD


class Module(NamedTuple):
    """One module and its ranks.

    ranks  ``ranks[replica][stage]``: the tensor-parallel ranks of a stage, as ranks of the whole job
    chunk  modules with the same number that share a rank run in one forward. Modules with different numbers are model
           chunks of the rank, in the order of their numbers, and run in the bubbles of each other.
    times  times of one stage's forward and backward of a microbatch, in any unit; orders of chunks are searched for
           these times
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

    source, target  ranks of the graph
    module          the module whose output, or whose output's gradient, it carries
    bridge          the module at the other end of a bridge; empty within a module
    part            (i, n): the i-th of n parts of the sender's tensor, along its batch dimension
    place           (i, n): the i-th of n parts of the receiver's tensor
    chunks          chunk of the source and chunk of the target
    name            name of its messages, which no other edge of activations or gradients has
    """

    source: int
    target: int
    module: str
    bridge: str = ""
    part: tuple[int, int] = (0, 1)
    place: tuple[int, int] = (0, 1)
    chunks: tuple[int, int] = (0, 0)
    name: str = ""

    @property
    def travels(self) -> bool:
        """Whether the edge goes from one rank to another."""
        return self.source != self.target


class ChunkEdges(NamedTuple):
    """The edges of one chunk: those it receives by, and those it sends by, in the order of the graph."""

    received: list[Edge]
    sent: list[Edge]

    @property
    def arriving(self) -> list[Edge]:
        """Edges from other ranks."""
        return [edge for edge in self.received if edge.travels]

    @property
    def leaving(self) -> list[Edge]:
        """Edges to other ranks."""
        return [edge for edge in self.sent if edge.travels]


class Chunk(NamedTuple):
    """The modules that a rank runs in one forward, by name, and the times of a forward and a backward."""

    modules: tuple[str, ...]
    times: tuple[float, float]


@dataclass(frozen=True)
class ModuleGraph:
    """The ranks that depend on each other, and their messages.

    modules      the modules on the graph's ranks; their ranks are those of the whole job
    topology     module -> the modules to which its output goes
    members      the ranks in the whole job, sorted; everything that follows counts ranks from 0 in this order
    activations  the edges of activations, in the order in which both ends of a channel post messages of one round
    gradients    the edges of gradients
    depths       for each rank the number of stages before its own, along the longest way through the modules
    stages       number of stages along the longest way through the modules
    leading      for each rank whether it is the first stage of all its modules; a function of the config does not
                 synchronise gradients there
    chunks       the chunks of each rank
    """

    modules: tuple[Module, ...]
    topology: tuple[tuple[str, tuple[str, ...]], ...]
    members: tuple[int, ...]
    activations: tuple[Edge, ...]
    gradients: tuple[Edge, ...]
    depths: tuple[int, ...]
    stages: int
    leading: tuple[bool, ...]
    chunks: tuple[tuple[Chunk, ...], ...]

    @property
    def num_chunks(self) -> int:
        """The largest number of chunks of a rank."""
        return max(map(len, self.chunks))

    @property
    def size(self) -> int:
        return len(self.members)

    @cached_property
    def edges(self) -> Mapping[str, Sequence[Sequence[ChunkEdges]]]:
        """FORWARD or BACKWARD -> the edges of each rank's chunks."""
        found = {op: [[ChunkEdges([], []) for _ in own] for own in self.chunks] for op in (FORWARD, BACKWARD)}
        for op, edges in ((FORWARD, self.activations), (BACKWARD, self.gradients)):
            for edge in edges:
                source, target = edge.chunks
                found[op][edge.source][source].sent.append(edge)
                found[op][edge.target][target].received.append(edge)
        return found

    def to_dict(self) -> dict[str, Any]:
        """The graph as a value for JSON, which ``modules_file.py`` reads."""
        return {"modules": [module._asdict() for module in self.modules], "topology": dict(self.topology)}

    def __str__(self) -> str:
        ways = [f"{edge.module} {self.members[edge.source]}>{self.members[edge.target]}" for edge in self.activations]
        return f"ranks {', '.join(map(str, self.members))}: {', '.join(ways)}"


def module_graphs(modules: Sequence[Module], topology: Mapping[str, Sequence[str]]) -> list[ModuleGraph]:
    """The graphs of ``modules``, one for each set of ranks that depend on each other (data-parallel replicas do not),
    sorted by ranks. ``topology``: module -> the modules to which its output goes.

    Raises PlanError for two modules of one name, for a topology with a circle or an unknown module, for stages of
    unequal numbers of ranks, for data-parallel sizes where neither is a multiple of the other, for two modules
    that a bridge joins on one rank in one chunk, and for a chunk that would receive two tensors of one module.
    """
    known = {module.name: module for module in modules}
    _check(modules, known, topology)
    before = _stages_before(known, topology)
    activations, gradients = _edges(modules, topology, known)
    held: dict[int, list[tuple[Module, int]]] = {}  # rank -> its modules, each with the stage that it holds
    for module in modules:
        for replica in module.ranks:
            for stage, ranks in enumerate(replica):
                for rank in ranks:
                    held.setdefault(rank, []).append((module, stage))
    numbers = {rank: sorted({module.chunk for module, _ in own}) for rank, own in held.items()}
    graphs = []
    for members in _components(held, [*activations, *gradients]):
        own = [held[rank] for rank in members]
        places = {rank: k for k, rank in enumerate(members)}
        forth, back = (
            tuple(_counted(edge, places, numbers) for edge in edges if edge.source in places)
            for edges in (activations, gradients)
        )
        depths = tuple(before[of_rank[0][0].name] + of_rank[0][1] for of_rank in own)
        stages = max(before[module.name] + module.stages for of_rank in own for module, _ in of_rank)
        leading = tuple(all(stage == 0 for _, stage in of_rank) for of_rank in own)
        chunks = tuple(tuple(_chunk(held[rank], number) for number in numbers[rank]) for rank in members)
        here = tuple(part for module in modules if (part := _on(members, module)).ranks)
        ways = tuple((module.name, tuple(topology.get(module.name, ()))) for module in here)
        graphs.append(ModuleGraph(here, ways, tuple(members), forth, back, depths, stages, leading, chunks))
    return graphs


def _on(members: Container[int], module: Module) -> Module:
    replicas = (
        tuple(tuple(rank for rank in stage if rank in members) for stage in replica) for replica in module.ranks
    )
    return module._replace(ranks=tuple(replica for replica in replicas if replica[0]))


def _chunk(held: Sequence[tuple[Module, int]], number: int) -> Chunk:
    together = [module for module, _ in held if module.chunk == number]
    forward, backward = (sum(module.times[k] for module in together) for k in (0, 1))
    return Chunk(tuple(module.name for module in together), (forward, backward))


def _counted(edge: Edge, places: Mapping[int, int], numbers: Mapping[int, list[int]]) -> Edge:
    """The edge with ranks and chunks counted from 0."""
    source, target = edge.chunks
    chunks = numbers[edge.source].index(source), numbers[edge.target].index(target)
    return edge._replace(source=places[edge.source], target=places[edge.target], chunks=chunks)


def _check(modules: Sequence[Module], known: Mapping[str, Module], topology: Mapping[str, Sequence[str]]) -> None:
    name, times = Counter(module.name for module in modules).most_common(1)[0]
    if times > 1:
        raise PlanError(f"module {name} is there twice")
    for source, targets in topology.items():
        for name in (source, *targets):
            if name not in known:
                raise PlanError(f"the topology names a module {name!r}; there are {', '.join(known)}")
    for name, module in known.items():
        if not module.ranks or len({len(replica) for replica in module.ranks}) != 1 or not module.stages:
            raise PlanError(f"module {name} needs replicas of one number of stages, at least 1")
        stages = [stage for replica in module.ranks for stage in replica]
        if len({len(stage) for stage in stages}) != 1 or not stages[0]:
            raise PlanError(f"module {name} needs stages of one number of tensor-parallel ranks, at least 1")
        rank, times = Counter(chain.from_iterable(stages)).most_common(1)[0]
        if times > 1:
            raise PlanError(f"rank {rank} is in module {name} {times} times; a rank has one stage of a module")
        if min(module.times) <= 0 or not all(map(isfinite, module.times)):
            raise PlanError(f"module {name} has times {module.times}; they must be finite and above 0")


def _stages_before(known: Mapping[str, Module], topology: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Module -> the number of stages before it along the longest way."""
    sources = {name: [source for source in known if name in topology.get(source, ())] for name in known}
    found: dict[str, int] = {}
    try:
        for name in TopologicalSorter(sources).static_order():
            found[name] = max((found[one] + known[one].stages for one in sources[name]), default=0)
    except CycleError as error:
        raise PlanError(f"the modules' outputs go in a circle: {' > '.join(error.args[1])}") from error
    return found


def _edges(
    modules: Sequence[Module], topology: Mapping[str, Sequence[str]], known: Mapping[str, Module]
) -> tuple[list[Edge], list[Edge]]:
    """The edges of activations and of gradients, between ranks of the whole job and chunks by their numbers."""
    activations: list[Edge] = []
    gradients: list[Edge] = []
    for module in modules:
        chunks = module.chunk, module.chunk
        stages = [both for replica in module.ranks for both in pairwise(replica)]
        steps = [step for stage, following in stages for step in zip(stage, following, strict=True)]
        activations += [Edge(before, after, module.name, chunks=chunks) for before, after in steps]
        gradients += [Edge(after, before, module.name, chunks=chunks) for before, after in steps]
    for source in modules:
        for target in _apart([known[name] for name in topology.get(source.name, ())]):
            for forth, back in _bridges(source, target):
                activations += forth
                gradients += back
    activations = [_named(edge, edge.module, edge.bridge) for edge in activations]
    gradients = [_named(edge, edge.bridge, edge.module) for edge in gradients]
    check_names([*activations, *gradients])
    _check_received(activations)
    return activations, gradients


def check_names(edges: Sequence[Edge]) -> None:
    """Raises PlanError if messages of two edges have the same name, because a rank finds its tensors by these names."""
    name, times = Counter(edge.name for edge in edges).most_common(1)[0] if edges else ("", 0)
    if times > 1:
        same = [f"{edge.module} {edge.source}>{edge.target}" for edge in edges if edge.name == name]
        raise PlanError(
            f"messages are named after their modules, and the messages {' and '.join(same)} have the same name "
            f"{name}; rename a module"
        )


def _apart(targets: Sequence[Module]) -> list[Module]:
    """``targets`` of one module's output, without those whose first stages are on the ranks of another target: they
    share one tensor with it, and one gradient goes back."""
    found: list[Module] = []
    for target in targets:
        places = target.chunk, [replica[0] for replica in target.ranks]
        if all(places != (other.chunk, [replica[0] for replica in other.ranks]) for other in found):
            found.append(target)
    return found


def _check_received(activations: Sequence[Edge]) -> None:
    """Raises PlanError if a chunk would receive two tensors of one module: it gets its tensors by the module's name."""
    received: dict[tuple[int, int, str], list[Edge]] = {}
    for edge in activations:
        received.setdefault((edge.target, edge.chunks[1], edge.module), []).append(edge)
    for (rank, _, module), edges in received.items():
        if [edge.place for edge in edges] != [(k, len(edges)) for k in range(len(edges))]:
            ways = sorted({f"for {edge.bridge}" if edge.bridge else "for its next stage" for edge in edges})
            raise PlanError(
                f"rank {rank} would receive two tensors of module {module} in one forward ({' and '.join(ways)}), and "
                "tensors are given by the names of modules; place the stages that take them on other ranks or in other "
                "chunks, or the first stages of modules that both take it on the same ranks"
            )


def _bridges(source: Module, target: Module) -> Iterator[tuple[list[Edge], list[Edge]]]:
    """The edges of activations and of gradients of each pair of replicas that exchange something."""
    names = (source.name, target.name)
    several = (len(source.ranks), len(target.ranks))
    larger = max(several)
    smaller = min(several)
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
        senders = source.ranks[sender][-1]
        receivers = target.ranks[receiver][0]
        if source.chunk == target.chunk and (shared := sorted({*senders} & {*receivers})):
            raise PlanError(f"rank {shared[0]} has the last stage of {names[0]} and the first of {names[1]}, its next")
        forth = (source.chunk, target.chunk)
        back = (target.chunk, source.chunk)
        yield (
            [Edge(senders[-1], rank, *names, part, place, forth) for rank in receivers],
            [Edge(receivers[0], rank, *names, place, part, back) for rank in senders],
        )


def _named(edge: Edge, first: str, second: str) -> Edge:
    """The edge with a name made of two modules, the sender first."""
    words = filter(None, (first, second, str(edge.source), str(edge.target)))
    return edge._replace(name=re.sub(r"\W", "_", "_".join(words)))


def _components(ranks: Iterable[int], edges: Sequence[Edge]) -> list[list[int]]:
    """The sets of ranks that edges connect. Each is sorted, and they are sorted by their first rank."""
    joined = {rank: {rank} for rank in ranks}
    for edge in edges:
        both = joined[edge.source] | joined[edge.target]
        if len(both) > len(joined[edge.source]):
            for rank in both:
                joined[rank] = both
    return sorted(sorted(one) for one in {id(found): found for found in joined.values()}.values())

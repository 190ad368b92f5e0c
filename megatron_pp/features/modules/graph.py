"""Several modules, each a line of stages on its own ranks, as one graph of ranks and the messages between them.

Every rank runs a forward and a backward of each microbatch, of all modules that it is in. Within a module a stage sends
to the next one, as in any pipeline. A *bridge* carries the output of a module's last stage to the first stage of
another one. Where their data-parallel sizes differ, the larger is a multiple of the smaller: with fewer replicas behind
the bridge a receiver concatenates a part of each of its senders (fan-in), with more a sender cuts its tensor into a
part for each of its receivers (fan-out). Of a tensor-parallel group one rank, its leader, sends, and all ranks
receive: the last one of a source's last stage, the first one of a destination's first stage (Megatron-core's
``BridgeCommunicator``, whose leaders broadcast what they received).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from megatron_pp.errors import PlanError
from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD


class Module(NamedTuple):
    """``ranks[replica][stage]``: the tensor-parallel ranks of a stage, of the whole job."""

    name: str
    ranks: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def stages(self) -> int:
        return len(self.ranks[0])


class Edge(NamedTuple):
    """Messages from one rank to another, one for each microbatch.

    name            of its messages, which no other edge has
    source, target  ranks of the graph
    module          the module whose output, or whose output's gradient, it carries
    bridge          the module at the other end of a bridge; empty within a module
    part            (i, n): the i-th of n parts of the sender's tensor, along its batch dimension
    place           (i, n): the i-th of n parts of the receiver's tensor
    """

    name: str
    source: int
    target: int
    module: str
    bridge: str = ""
    part: tuple[int, int] = (0, 1)
    place: tuple[int, int] = (0, 1)


class RankEdges(NamedTuple):
    """Of one rank: what it receives and sends, in the order of the graph."""

    received: tuple[Edge, ...]
    sent: tuple[Edge, ...]


@dataclass(frozen=True)
class ModuleGraph:
    """Ranks that depend on each other, and no others.

    members      their ranks in the whole job, sorted; everything else counts ranks from 0 in this order
    activations  the edges of activations, in the order in which both ends of a channel post messages of one round
    gradients    the edges of gradients
    depths       of each rank: stages before its own, along the longest way through the modules to its first one
    stages       along the longest way through all modules
    leading      of each rank: whether it is the first stage of all its modules
    """

    members: tuple[int, ...]
    activations: tuple[Edge, ...]
    gradients: tuple[Edge, ...]
    depths: tuple[int, ...]
    stages: int
    leading: tuple[bool, ...]

    @property
    def size(self) -> int:
        return len(self.members)

    @cached_property
    def edges(self) -> Mapping[str, tuple[RankEdges, ...]]:
        """By FORWARD and BACKWARD: the edges of each rank."""
        return {FORWARD: self._of_ranks(self.activations), BACKWARD: self._of_ranks(self.gradients)}

    def _of_ranks(self, edges: Sequence[Edge]) -> tuple[RankEdges, ...]:
        ranks = range(self.size)
        received = [tuple(edge for edge in edges if edge.target == rank) for rank in ranks]
        sent = [tuple(edge for edge in edges if edge.source == rank) for rank in ranks]
        return tuple(map(RankEdges, received, sent))

    def __str__(self) -> str:
        ways = [f"{edge.module} {self.members[edge.source]}>{self.members[edge.target]}" for edge in self.activations]
        return f"ranks {', '.join(map(str, self.members))}: {', '.join(ways)}"


def module_graphs(modules: Sequence[Module], topology: Mapping[str, Sequence[str]]) -> list[ModuleGraph]:
    """The graphs of ``modules``, one for each set of ranks that depend on each other: data-parallel replicas do not.
    ``topology``: by module, those that its output goes to. Sorted by ranks.

    Raises PlanError for a topology with a circle or an unknown module, for data-parallel sizes of which neither is a
    multiple of the other, and for two modules that a bridge joins on one rank.
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
    graphs = []
    for members in _components(depths, [*activations, *gradients]):
        number = {rank: at for at, rank in enumerate(members)}
        forth, back = (
            tuple(_renumbered(edge, number) for edge in edges if edge.source in number)
            for edges in (activations, gradients)
        )
        of_ranks = tuple(depths[rank] for rank in members), total, tuple(leading[rank] for rank in members)
        graphs.append(ModuleGraph(tuple(members), forth, back, *of_ranks))
    return graphs


def _check(known: Mapping[str, Module], topology: Mapping[str, Sequence[str]]) -> None:
    for source, targets in topology.items():
        for name in (source, *targets):
            if name not in known:
                raise PlanError(f"the topology names a module {name!r}; there are {', '.join(known)}")
    for name, module in known.items():
        if not module.ranks or len({len(replica) for replica in module.ranks}) != 1 or not module.stages:
            raise PlanError(f"module {name} needs replicas of one number of stages, at least 1")


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
        if shared := sorted({*senders} & {*receivers}):
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


def _renumbered(edge: Edge, number: Mapping[int, int]) -> Edge:
    return edge._replace(source=number[edge.source], target=number[edge.target])


def _components(ranks: Mapping[int, int], edges: Sequence[Edge]) -> list[list[int]]:
    """The ranks that edges join, sorted; sorted by their first."""
    joined = {rank: {rank} for rank in ranks}
    for edge in edges:
        both = joined[edge.source] | joined[edge.target]
        if len(both) > len(joined[edge.source]):
            for rank in both:
                joined[rank] = both
    return sorted(sorted(one) for one in {id(found): found for found in joined.values()}.values())

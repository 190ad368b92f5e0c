"""The process that looks for another plan for a run that goes on: it reads what ranks have recorded of a few steps, and
writes the plans that it proposes.

A process of its own, as a search is minutes of Python, which in a thread would hold up the training loop. Never imports
torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any

from megatron_pp.common.child_process import Child, answer_questions
from megatron_pp.errors import PlanError
from megatron_pp.plan.costs.stage_costs import Network, StageCosts
from megatron_pp.planner.replan import Proposal, proposed
from megatron_pp.tracing.analysis import Findings, analyse
from megatron_pp.tracing.files import parse_rank_trace
from megatron_pp.tracing.run import pipeline_of

_NICE = 10


@dataclass(frozen=True)
class Recorded:
    """What the search is given.

    traces   of every rank of the job: the text of a trace file
    splits   whether the model can put weight gradients off
    draws    whether its forwards draw random numbers
    shares   for each plan that is asked for, what its microbatches take of the times; () where all take the same"""

    traces: Sequence[str]
    splits: bool
    draws: bool
    shares: Sequence[tuple[float, ...]] = ((),)


@dataclass(frozen=True)
class Answer:
    """``kept``: for each plan that is not proposed, its shares and why."""

    proposals: list[Proposal]
    kept: list[tuple[tuple[float, ...], str]]


def search_plans(recorded: Recorded) -> Answer:
    """Plans for what the first pipeline ran last, where they are predicted to be faster. Raises FileFormatError and
    PlanError for traces that do not go together."""
    traces = [parse_rank_trace(text, f"rank {rank}") for rank, text in enumerate(recorded.traces)]
    firsts = sorted({trace.header.pipeline[0] for trace in traces})
    found = [analyse(pipeline_of(traces, first, "the job")) for first in firsts]
    costs, network = reduce(_slower_costs, (one.costs for one in found)), _slowest_links(found)
    plan = found[0].measured.plan
    answer = Answer([], [])
    for shares in recorded.shares:
        try:
            better = proposed(plan, recorded.splits, recorded.draws, costs, network, tuple(shares))
        except PlanError as error:
            better = str(error)
        if isinstance(better, str):
            answer.kept.append((tuple(shares), better))
        else:
            answer.proposals.append(better)
    return answer


def _slower_costs(one: StageCosts, other: StageCosts) -> StageCosts:
    """Of pipelines that wait for each other's gradients, the slower stages count."""

    def slower(name: str) -> tuple[float, ...]:
        return tuple(map(max, getattr(one, name), getattr(other, name)))

    return StageCosts(slower("forward"), slower("backward"), slower("backward_input"), slower("weight"))


def _slowest_links(found: Sequence[Findings]) -> Network:
    network = found[0].network
    links = dict(network.links)
    for one in found[1:]:
        for edge, link in one.network.links.items():
            links[edge] = min(link, links.get(edge, link), key=lambda each: each.bandwidth)
    return replace(network, links=links)


def searched(recorded: Recorded, started: Callable[[Child], None]) -> Answer:
    """What ``search_plans`` answers, in a process of its own, which ``started`` is given. Raises RuntimeError where it
    fails."""
    child = Child(__name__)
    started(child)
    child.ask(asdict(recorded))
    try:
        return answer_in(child.answer())
    except ChildProcessError as error:
        raise RuntimeError(f"the search {error}") from error
    finally:
        child.end()


def answer_in(content: dict[str, Any]) -> Answer:
    kept = [(tuple(shares), why) for shares, why in content["kept"]]
    return Answer([Proposal.from_dict(one) for one in content["proposals"]], kept)


def content_of(answer: Answer) -> dict[str, Any]:
    return {"proposals": [one.to_dict() for one in answer.proposals], "kept": answer.kept}


def main() -> None:
    answer_questions(lambda recorded: content_of(search_plans(Recorded(**recorded))), _NICE)

"""The process that looks for another plan for a run that goes on: it reads what ranks have recorded of a few steps, and
writes the plans that it proposes.

A process of its own, as a search is minutes of Python, which in a thread would hold up the training loop. Never imports
torch.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path

from megatron_pp.errors import PlanError
from megatron_pp.plan.costs.stage_costs import Network, StageCosts
from megatron_pp.planner.replan import Proposal, proposed
from megatron_pp.tracing.analysis import Findings, analyse
from megatron_pp.tracing.files import parse_rank_trace
from megatron_pp.tracing.run import pipeline_of

_COMMAND = "import sys; from megatron_pp.features.replanning.proposing import main; main()"
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


def searched(recorded: Recorded, started: Callable[[subprocess.Popen[bytes]], None]) -> Answer:
    """What ``search_plans`` answers, in a process of its own, which ``started`` is given. Raises RuntimeError where it
    fails."""
    process = _process()
    started(process)
    out, errors = process.communicate(json.dumps(asdict(recorded)).encode())
    if process.returncode != 0:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise RuntimeError(f"the search ended with code {process.returncode}: {last[-400:]}")
    return read_answer(out)


def _process() -> subprocess.Popen[bytes]:
    place = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(path for path in (place, os.environ.get("PYTHONPATH")) if path)
    return subprocess.Popen(
        [sys.executable, "-c", _COMMAND],
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def read_answer(text: bytes | str) -> Answer:
    content = json.loads(text)
    kept = [(tuple(shares), why) for shares, why in content["kept"]]
    return Answer([Proposal.from_dict(one) for one in content["proposals"]], kept)


def answer_text(answer: Answer) -> str:
    return json.dumps({"proposals": [one.to_dict() for one in answer.proposals], "kept": answer.kept})


def main() -> None:
    """Read a Recorded from the standard input, and write the answer."""
    if hasattr(os, "nice"):
        os.nice(_NICE)
    sys.stdout.write(answer_text(search_plans(Recorded(**json.load(sys.stdin)))))

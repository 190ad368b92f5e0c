"""Real gloo processes: losses and gradients equal those of one process, to the last bit.

A covering subset of what ``unit_tests/runtime/test_differential.py`` runs over the in-memory transport, and the cases
in which a well-known stack returns wrong gradients or hangs: two ranks with two chunks each under the batched policy,
and evaluation under overlap with warm-up flush. Four processes run all cases; in those of three ranks the last idles.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist

from megatron_pp.testing.toy import TOY_SCHEDULES, ToyData, ToyResult, merged, reference_run
from megatron_pp.weight_grad import split_weight_grad
from testkit.process_ranks import rank_of
from testkit.processes import run_processes

WORLD = 4
# Pipeline size -> the groups, which take cases in turn.
GROUPS = {1: [[0], [1], [2], [3]], 2: [[0, 1], [2, 3]], 3: [[0, 1, 2]], 4: [[0, 1, 2, 3]]}

OVERLAP: dict[str, Any] = {"overlap_p2p_comm": True}
FLUSH: dict[str, Any] = {"overlap_p2p_comm": True, "overlap_p2p_comm_warmup_flush": True}
BATCHED: dict[str, Any] = {"batch_p2p_comm": True}
PLAIN: dict[str, Any] = {}
POLICIES = {"overlap": OVERLAP, "flush": FLUSH, "batched": BATCHED, "plain": PLAIN}


@dataclass(frozen=True)
class Case:
    """One step."""

    size: int
    chunks: int
    count: int
    policy: str
    variable: bool = False
    forward_only: bool = False
    split: bool = False
    fields: tuple[tuple[str, Any], ...] = field(default=())

    def __str__(self) -> str:
        words = [f"P={self.size}", f"V={self.chunks}", f"M={self.count}", self.policy]
        words += ["variable"] * self.variable + ["forward-only"] * self.forward_only
        words += ["split"] * self.split
        return " ".join(words + [f"{name}={value}" for name, value in self.fields])


def grid() -> list[Case]:
    cases = []
    both = (False, True)
    for policy in POLICIES:
        # Two ranks are each other's next and previous: what could cross, crosses here.
        cases += [Case(2, 2, m, policy, forward_only=only) for m, only in itertools.product((1, 2, 5), both)]
        cases += [Case(2, 2, 4, policy, variable, fields=(("p2p_channels", "shared"),)) for variable in both]
        cases += [Case(2, 1, 5, policy, variable) for variable in both]
        cases += [Case(2, 1, 5, policy, True, fields=(("p2p_channels", "shared"),))]
        # Groups larger than the pipeline, and a ragged last one.
        cases += [Case(2, 3, 6, policy, fields=(("microbatch_group_size_per_vp_stage", 3),))]
        cases += [Case(3, 2, 7, policy, fields=(("microbatch_group_size_per_vp_stage", 6),))]
        cases += [Case(3, 2, 7, policy), Case(3, 1, 4, policy, True, True)]
        # Shapes that travel ahead hang from four ranks on elsewhere.
        cases += [Case(4, 1, 5, policy, True), Case(4, 2, 9, policy, True), Case(4, 2, 9, policy, forward_only=True)]
        cases += [Case(4, 3, 5, policy)]
        cases += [Case(1, 3, 4, policy)]
    return cases


def schedules() -> list[Case]:
    """Every registered schedule at four ranks, in training and in evaluation; those that each rank searches, once."""
    cases = []
    ways = (("overlap", False), ("batched", False), ("plain", True))
    for name, family in TOY_SCHEDULES.items():
        chunks = family.chunks or 2
        count = 8 if family.search is None else 4  # a search of seconds, on each rank
        for policy, only in ways if family.search is None else ways[:1]:
            cases.append(Case(4, chunks, count, policy, forward_only=only, fields=(("pipeline_schedule", name),)))
    return cases


def split_backwards() -> list[Case]:
    """Backwards in two halves, layers converted: ragged numbers of microbatches, and fewer than ranks."""
    cases = []
    for name, family in TOY_SCHEDULES.items():
        if not family.splits_weight and name not in ("eager_1f1b", "1f1b_v"):
            continue
        fields = (("pipeline_schedule", name),)
        ways = ((2, 5, "overlap"), (4, 9, "overlap"), (4, 3, "batched"))
        for size, count, policy in ways if family.search is None else ways[:1]:
            cases.append(Case(size, family.chunks or 2, count, policy, split=True, fields=fields))
    return cases


CASES = [*grid(), *schedules(), *split_backwards()]


def rank_main(rank: int, size: int) -> list[ToyResult | None]:
    """The cases of the groups that this rank is in; None in the place of others."""
    groups = {p: [dist.new_group(ranks) for ranks in lists] for p, lists in GROUPS.items()}
    results: list[ToyResult | None] = []
    for turn, case in enumerate(CASES):
        number = turn % len(GROUPS[case.size])
        results.append(run_case(case, groups[case.size][number]) if rank in GROUPS[case.size][number] else None)
    return results


def run_case(case: Case, group: Any) -> ToyResult:
    fields = {"variable_seq_lengths": case.variable, **POLICIES[case.policy], **dict(case.fields)}
    rank = rank_of(case.chunks, case.count, group=group, **fields)
    return rank.run(split_weight_grad if case.split else None, forward_only=case.forward_only)


# One start serves all tests, on one worker.
@pytest.fixture(scope="module")
def results() -> list[list[ToyResult]]:
    """Per case, what each rank that took part returned."""
    per_rank = run_processes(rank_main, WORLD, timeout=240.0, start_method="mixed")
    return [[result for result in of_case if result is not None] for of_case in zip(*per_rank, strict=True)]


@pytest.mark.parametrize("number", range(len(CASES)), ids=list(map(str, CASES)))
def test_gloo_processes_give_the_numbers_of_one(results: list[list[ToyResult]], number: int) -> None:
    case = CASES[number]
    data = ToyData(case.count, variable=case.variable)
    assert len(results[number]) == case.size
    result = merged(results[number])
    assert len(result.losses) == case.count
    assert result.difference(reference_run(case.size * case.chunks, data, case.forward_only)) == 0.0

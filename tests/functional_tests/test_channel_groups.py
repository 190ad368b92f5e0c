"""Large messages on gloo go through groups of two, one per one-way channel, and threads post them. The numbers are
those of one process, channels can be made whatever other groups a rank is in, and none of them is left in the end.
Messages, agreements and failures of one pipeline never reach another one on the same ranks, in whatever order each rank
begins.

NCCL makes its channels in the same way. All runs share the same four processes.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from megatron_pp.comm.group_transport import pipeline_name
from megatron_pp.plan.costs.transports import GLOO_DETACHED_BYTES
from megatron_pp.runtime.communicators import close_communicators
from megatron_pp.testing.toy import HIDDEN, ToyData, ToyResult, merged, reference_run
from testkit.process_ranks import rank_of
from testkit.processes import run_processes

SIZE = 4
STEPS = 2
LARGE = GLOO_DETACHED_BYTES // (4 * HIDDEN * 2) + 1  # sequence length of a message that gets its own channel
APART = 0.3  # seconds between the first steps of the two pipelines on one rank
OVERLAP = {"overlap_p2p_comm": True}
# In torch 2.15 a group that only some ranks make changes the names of these ranks' later groups, so that the next group
# of all ranks hangs while it is made, without this package too.
LEAVES_LATER_GROUPS = TorchVersion(torch.__version__) < (2, 15)


class Pipeline(NamedTuple):
    """One of several pipelines, each of which has its own microbatches in each step, by ``number``."""

    chunks: int
    fields: dict[str, Any]
    microbatches: int = 5
    number: int = 0

    def data(self, step: int) -> ToyData:
        variable, first = self.fields.get("variable_seq_lengths", False), 1000 * self.number + 100 * step
        return ToyData(self.microbatches, seq_length=LARGE, variable=variable, first=first)

    def steps(self, group: Any) -> list[tuple[ToyResult, int]]:
        """Take steps, and return for each one this rank's result and its number of channels."""
        found = []
        for step in range(STEPS):
            rank = rank_of(self.chunks, self.microbatches, group=group, data=self.data(step), **self.fields)
            found.append((rank.run(), len(rank.communicator.transport._channels)))  # type: ignore[attr-defined]
        return found


ALONE = {
    "overlap": Pipeline(2, OVERLAP),
    "overlap again": Pipeline(2, OVERLAP),  # channels are made again under names that were used
    "plain": Pipeline(1, {}),
    "batched": Pipeline(2, {"batch_p2p_comm": True}),
    "variable": Pipeline(1, {**OVERLAP, "variable_seq_lengths": True}),
    "zb_v": Pipeline(2, {**OVERLAP, "pipeline_schedule": "zb_v"}),
}
SAME = [Pipeline(1, {}, 4, number) for number in range(2)]
DIFFERENT = [SAME[0], Pipeline(2, OVERLAP, 8, 1)]
# Ranks and pipelines, which run at once, each in its own thread, or in turn, as a policy and a reward model.
TWO = {
    "same at once": ([0, 1], SAME, True),
    "different at once": ([0, 1, 2, 3], DIFFERENT, True),
    "different in turn": ([0, 1], DIFFERENT, False),
}


def at_once(rank: int, groups: list[Any], pipelines: list[Pipeline]) -> list[Any]:
    """Run each pipeline in its own thread; even and odd ranks begin with different pipelines."""
    results: dict[int, Any] = {}

    def run(number: int) -> None:
        results[number] = pipelines[number].steps(groups[number])

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(pipelines))]
    for thread in threads if rank % 2 == 0 else reversed(threads):
        thread.start()
        time.sleep(APART)
    for thread in threads:
        thread.join(40.0)
    return [results[number] for number in range(len(pipelines))]


def in_turn(groups: list[Any], pipelines: list[Pipeline]) -> list[Any]:
    """Run the pipelines in turn, twice, so that each is used again after the other."""
    return [[one.steps(group) for one, group in zip(pipelines, groups, strict=True)] for _ in range(2)][-1]


def names() -> tuple[str, str, str]:
    """Return the names of two groups over the same ranks, and the name of the first if torch names it differently on
    each rank, as ``split_group`` does."""
    cpu = torch.device("cpu")
    groups = [dist.new_group(list(range(SIZE))) for _ in range(2)]
    first, second = (pipeline_name(group, "gloo", cpu) for group in groups)
    groups[0]._set_group_name(f"hash of what rank {dist.get_rank()} is in")
    return first, second, pipeline_name(groups[0], "nccl", cpu)


def rank_main(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"names": names(), "threads": []}
    if rank < 2 and LEAVES_LATER_GROUPS:  # the ranks are in different numbers of groups
        dist.new_group([0, 1], use_local_synchronization=True)
    for name, pipeline in ALONE.items():
        found[name] = [pipeline.steps(dist.group.WORLD)]
        close_communicators()
        found["threads"] += [one.name for one in threading.enumerate() if one.name.startswith("megatron_pp sends")]
    for name, (ranks, pipelines, threads) in TWO.items():
        groups = [dist.new_group(ranks) for _ in pipelines]
        if rank in ranks:
            found[name] = at_once(rank, groups, pipelines) if threads else in_turn(groups, pipelines)
            close_communicators()
    return found


@pytest.fixture(scope="module")
def per_rank() -> list[dict[str, Any]]:
    return run_processes(rank_main, SIZE, timeout=300.0, start_method="mixed")


@pytest.mark.parametrize("name", [*ALONE, *TWO])
def test_numbers_are_those_of_one_process(per_rank: list[dict[str, Any]], name: str) -> None:
    ranks, pipelines = TWO[name][:2] if name in TWO else (range(SIZE), [ALONE[name]])
    for number, pipeline in enumerate(pipelines):
        for step in range(STEPS):
            expected = reference_run(len(ranks) * pipeline.chunks, pipeline.data(step))
            found = merged([per_rank[rank][name][number][step][0] for rank in ranks])
            assert found.difference(expected) == 0.0, (number, step)


@pytest.mark.parametrize("name", ALONE)
def test_every_rank_has_the_channels_of_its_edges(per_rank: list[dict[str, Any]], name: str) -> None:
    """A rank has two edges in a loop and inside a line, one at the ends of a line; each with two kinds of messages."""
    in_a_line = [2, 4, 4, 2]
    both_ways = [2 * n for n in in_a_line]  # a V goes down the ranks and up again
    around = [4] * SIZE
    unknown = [0] * SIZE  # sizes that travel with the messages are not known when channels are made
    wanted = {"plain": in_a_line, "zb_v": both_ways, "variable": unknown}.get(name, around)
    assert [found[name][0][-1][1] for found in per_rank] == wanted


def test_threads_of_channel_groups_end(per_rank: list[dict[str, Any]]) -> None:
    assert [found["threads"] for found in per_rank] == [[]] * SIZE


def test_a_group_has_one_name(per_rank: list[dict[str, Any]]) -> None:
    (one,) = {found["names"] for found in per_rank}
    assert one == ("0-1-2-3 in group 1", "0-1-2-3 in group 2", "0-1-2-3 in group hash of what rank 0 is in")

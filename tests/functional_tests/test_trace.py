"""Traces of real processes over gloo: one run number, one file per rank, and merging, also with several pipelines."""

from __future__ import annotations

import contextlib
import json
import time
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_pp.errors import PipelinePeerError
from megatron_pp.features.measuring import measuring
from megatron_pp.plan.costs.measured import MeasuredFile
from megatron_pp.runtime.communicators import close_communicators
from megatron_pp.testing.toy import ToyBlock
from megatron_pp.tools.cli.command_line import main
from megatron_pp.tracing.analysis import analyse
from megatron_pp.tracing.run import load_run
from testkit.process_ranks import rank_of
from testkit.processes import RankFailedError, run_processes

SECONDS = 0.005


class SleepingBlock(ToyBlock):
    """A stage that takes (s + 1) * SECONDS, where s is its number."""

    def __init__(self, stage):
        super().__init__(stage)
        self.seconds = SECONDS * (stage + 1)

    def forward(self, x):
        time.sleep(self.seconds)
        return super().forward(x)


def train_rank(rank, size, folder, pipelines=1, policy="overlap", traced=(), measured=()):
    """Take a few steps of the toy model. Ranks form ``pipelines`` pipelines, in turn as with data parallelism."""
    groups = [dist.new_group(list(range(k, size, pipelines))) for k in range(pipelines)]
    one = rank_of(
        1,
        6,
        group=groups[rank % pipelines],
        trace_dir=str(folder) if rank in traced else None,
        trace_steps="2-3",
        overlap_p2p_comm=policy == "overlap",
        batch_p2p_comm=policy == "batched",
        measure=1 if rank in measured else 0,
        measure_out=f"{folder}/of-pipeline-{rank % pipelines}.json",
    )
    model = one.model(SleepingBlock)
    for _ in range(3):
        one.step(model)
    close_communicators()


POLICIES = ["overlap", "batched", "plain"]


def train_under_each_policy(rank, size, folder):
    for policy in POLICIES:
        train_rank(rank, size, folder / policy, policy=policy, traced=range(size))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies")
    run_processes(train_under_each_policy, 3, (folder,), timeout=120, start_method="forkserver")
    return folder


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_of_a_job_write_one_run(folder, policy, capsys):
    run = load_run(folder / policy)
    assert run.steps == (2, 3)
    assert [t.header.pipeline for t in run.ranks] == [(0, 1, 2)] * 3
    found = analyse(run)
    sent = {link: messages for link, (messages, _) in found.measured.volume().items()}
    assert sent == {(0, 1): 6, (1, 0): 6, (1, 2): 6, (2, 1): 6}
    for t in found.measured.transfers:  # on one machine no event may come before its cause
        assert t.end >= max(t.send_posted, t.receive_posted)
    for rank in range(1, 3):
        first = next(e for e in found.measured.events(rank) if str(e.instruction) == "F0.0")
        before = next(e for e in found.measured.events(rank - 1) if str(e.instruction) == "F0.0")
        assert first.start >= before.end
    assert main(["report", str(folder / policy)]) == 0
    assert "slowest rank" in capsys.readouterr().out


def test_pipelines_of_a_job_share_the_run_number(tmp_path):
    arguments = (tmp_path, 2, "overlap", range(4), range(4))
    run_processes(train_rank, 4, arguments, timeout=120, start_method="forkserver")
    assert [path.name for path in tmp_path.glob("*.json")] == ["of-pipeline-0.json"], "the first rank's alone"
    measured = MeasuredFile.from_dict(json.loads((tmp_path / "of-pipeline-0.json").read_text()))
    for stage, seconds in enumerate(measured.values.forward):
        assert 1 <= seconds / (SECONDS * (stage + 1)) < 4
    assert measured.values.activation == (2 * 3 * 2 * 4 * 4, 3 * 3 * 2 * 4 * 4 + 4)
    assert measured.network is not None
    assert measured.network.message == measured.network.transfers[-2][0] == 3 * 2 * 4 * 4
    assert len(list(tmp_path.glob("*.jsonl"))) == 4
    one, other = load_run(tmp_path, rank=0), load_run(tmp_path, rank=1)
    assert one.name == other.name
    assert [t.header.pipeline for t in (*one.ranks, *other.ranks)] == [(0, 2), (0, 2), (1, 3), (1, 3)]


@pytest.mark.parametrize(("traced", "measured", "what"), [([0], [], "tracing"), ([], [1], "measure")])
def test_tracing_or_measuring_on_some_ranks_only_raises_an_error(tmp_path, traced, measured, what):
    arguments = (tmp_path, 1, "overlap", traced, measured)
    with pytest.raises(RankFailedError, match=what):
        run_processes(train_rank, 2, arguments, timeout=120, start_method="forkserver")


def fail_while_links_are_timed(rank, size, folder):
    """Fail rank 1 while links are timed, and return the error of each rank."""
    fault = mock.patch.object(measuring, "measure_links", side_effect=ValueError("no link"))
    raised = ValueError if rank == 1 else PipelinePeerError
    with fault if rank == 1 else contextlib.nullcontext(), pytest.raises(raised, match="no link"):
        train_rank(rank, size, folder, measured=range(size))


def test_a_rank_that_fails_while_links_are_timed_is_every_ranks_error(tmp_path):
    run_processes(fail_while_links_are_timed, 3, (tmp_path,), timeout=60, start_method="forkserver")
    assert not list(tmp_path.glob("*.json"))

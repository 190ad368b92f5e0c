"""A run that measures what its stages cost: what is in the file, who reads it, and that training stays as it is."""

from __future__ import annotations

import gc
import json
import logging
import os
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_pp.comm.link_timing import measure_links
from megatron_pp.errors import ConfigError, PlanError, ScheduleInputError
from megatron_pp.features.measuring.measuring import Measuring, gather_by_stage
from megatron_pp.features.pairs.pair_runner import in_turn
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.measured import MeasuredFile, fitted_link, measured_values
from megatron_pp.plan.ir.instruction_text import parse_program
from megatron_pp.plan.ir.placement import PLACEMENTS, Placement
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.runtime.footprint import measure_footprint
from megatron_pp.testing.adversarial_transports import HOSTILE_NETWORKS
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.pipeline import placement_of
from megatron_pp.testing.threads import run_ranks
from megatron_pp.testing.toy import ToyData, ToyResult, toy_chunks, toy_config, toy_loss
from megatron_pp.tools.cli.command_line import main
from megatron_pp.tracing.analysis import StageTimes
from megatron_pp.weight_grad import split_weight_grad
from testkit.models.blocks import of_stage
from testkit.thread_runs.p2p_ranks import NothingMayPass
from testkit.thread_runs.step_runs import Rank, pipeline
from testkit.thread_runs.toy_training import train_toy

FORWARD, BACKWARD = (0.004, 0.008), (0.008, 0.016)  # seconds by stage
ACTIVATION = 3 * 2 * 4 * 4  # bytes of a tensor of the toy model


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stage: int) -> torch.Tensor:
        ctx.stage = stage
        time.sleep(FORWARD[stage])
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(BACKWARD[ctx.stage])
        return grad, None


SleepingBlock = of_stage(lambda stage, x, block: Sleep.apply(block(x), stage))


def train(
    size: int, num_chunks: int = 1, *, steps: int = 4, kind: type[MemoryNetwork] = MemoryNetwork, **more: Any
) -> ToyResult:
    return train_toy(kind(size), num_chunks, steps=steps, **{"microbatches": 5, **more})


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def found(path: str = "megatron_pp_measured.json") -> MeasuredFile:
    return MeasuredFile.from_dict(json.loads(Path(path).read_text()))


# --- what is in the file


@pytest.mark.slow
def test_times_of_stages_are_those_that_they_take_and_auto_and_advise_read_them(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    train(2, measure=2, block=SleepingBlock)
    file = found()
    assert file.units is not None
    assert (file.units.time, file.units.memory) == ("s", "bytes")
    for took, slept in ((file.values.forward, FORWARD), (file.values.backward, BACKWARD)):
        assert isinstance(took, tuple)
        for seconds, least in zip(took, slept, strict=True):
            assert least <= seconds < 10 * least
    assert [r.message for r in caplog.records if "measured over 2 steps: times of 2 stages" in r.message]
    assert file.run is not None
    assert (file.run.steps, file.run.schedule, file.run.num_microbatches) == (2, "1f1b", 5)

    measured = measured_values("megatron_pp_measured.json")
    plan = build_plan(PlanSpec("auto", 2, 1, 5, measured=measured))
    assert plan.spec.measured == file.values
    options = ["--costs", "megatron_pp_measured.json", "--memory-gb", "1", "--global-batch", "8", "--max-chunks", "1"]
    assert main(["advise", *options, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    busiest = 1e3 * max(sum(pair) for pair in zip(file.values.forward, file.values.backward, strict=True))  # type: ignore[arg-type]
    step = answer["recommended"]["step_ms"]
    assert 8 * busiest * 0.5 < step < 8 * busiest * 2


def test_slices_of_a_sequence_add_up() -> None:
    train(2, steps=2, measure=1, block=SleepingBlock, sequence_slices=3, pipeline_schedule="seq_1f1b")
    assert isinstance(found().values.forward, tuple)
    for seconds, least in zip(found().values.forward, FORWARD, strict=True):
        assert 3 * least <= seconds < 30 * least
    assert found().values.activation == (2 * ACTIVATION, 3 * ACTIVATION + 3 * 4)


def test_disturbed_operations_count_where_there_are_no_others() -> None:
    program, times = parse_program("F0.0 F0.1 B0.0"), StageTimes()
    placed = Placement("loop", 1, 1).place(0, program)
    times.add(placed, [0, 10, 20], [9, 12, 25], disturbed=lambda at: at.mb == 0)
    assert times.medians() == {("F", 0): 2, ("B", 0): 5}


@pytest.mark.slow
def test_bytes_are_what_a_microbatch_keeps() -> None:
    train(2, measure=1, split=True, pipeline_schedule="zb_h1")
    # The input and tanh's output; on the last stage also the difference that pow saves, and the loss.
    assert found().values.activation == (2 * ACTIVATION, 3 * ACTIVATION + 4)
    assert found().values.weight_activation == (2 * ACTIVATION, 2 * ACTIVATION)
    chunks = toy_chunks(placement_of(toy_config(), 1, 1), 0, toy_config())
    store = split_weight_grad(chunks)

    def forward() -> tuple[Any, torch.Tensor]:
        x, target = ToyData(1).microbatch(0)
        chunks[0].set_input_tensor([None])
        return x, toy_loss(target, chunks[0](x))[0]

    by_hand = measure_footprint(store, chunks, 0, forward)
    assert (by_hand.forward, by_hand.weight) == (3 * ACTIVATION + 4, 2 * ACTIVATION)


def test_stages_that_offload_all_forwards_are_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    fields: dict[str, Any] = {"pipeline_schedule": "pipe_offload", "split": True}
    assert train(2, 2, measure=2, **fields).difference(train(2, 2, **fields)) == 0
    content = json.loads(Path("megatron_pp_measured.json").read_text())
    assert "activation" not in content
    options = ["--costs", "megatron_pp_measured.json", "--memory-gb", "1", "--global-batch", "8"]
    assert main(["advise", *options]) == 2
    assert "memory was not measured" in capsys.readouterr().err


def test_parameters_do_not_count_with_a_single_microbatch() -> None:
    train(1, measure=1, microbatches=1)
    assert found().values.activation == (3 * ACTIVATION + 4,)


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_numbers_of_all_stages_are_on_all_ranks(kind: str) -> None:
    network, placement = MemoryNetwork(3), Placement(kind, 3, 2)

    def rank_main(rank: int) -> list[list[float]]:
        mine = {stage: [stage, 0.5 * stage] for stage in placement.stages[rank]}
        return gather_by_stage(network.transport(rank), placement, mine)

    assert run_ranks(3, rank_main, network.abort) == [[[stage, 0.5 * stage] for stage in range(6)]] * 3


def test_memory_shared_by_all_microbatches_counts_as_the_models() -> None:
    tables = [torch.rand(3, 2, 4, generator=torch.Generator().manual_seed(1)) for _ in range(2)]  # no buffers
    with_table = of_stage(lambda stage, x, block: block(x) * tables[stage])
    train(2, measure=1, block=with_table)
    assert found().values.activation == (2 * ACTIVATION, 3 * ACTIVATION + 4)


@pytest.mark.parametrize(
    ("size", "num_chunks", "schedule"), [(3, 1, "1f1b"), (2, 2, "interleaved_1f1b"), (3, 2, "zb_v")]
)
def test_every_link_and_every_stage_is_in_the_file(size: int, num_chunks: int, schedule: str) -> None:
    train(size, num_chunks, measure=1, split=True, pipeline_schedule=schedule)
    file, placement = found(), placement_of(toy_config(pipeline_schedule=schedule), size, num_chunks)
    assert file.network is not None
    assert {(source, target) for source, target, *_ in file.network.links} == set(placement.rank_edges)
    assert [n for n, _ in file.network.transfers] == [ACTIVATION // 4, 64, ACTIVATION, 2 * ACTIVATION]
    assert file.values.transfer == dict(file.network.transfers)[ACTIVATION] > 0
    assert isinstance(file.values.forward, tuple)
    assert len(file.values.forward) == size * num_chunks
    assert min(file.values.forward) > 0
    assert isinstance(file.values.activation, tuple)
    assert file.values.activation[:-1] == (2 * ACTIVATION,) * (size * num_chunks - 1)


def test_a_pipeline_of_one_rank_has_no_links() -> None:
    train(1, measure=1)
    assert found().network is None
    assert found().values.transfer == 0
    assert found().copies is not None


def test_links_are_timed_at_both_ends_in_one_order() -> None:
    network, edges = MemoryNetwork(4), [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2), (3, 0)]
    times = run_ranks(4, lambda rank: measure_links(network.transport(rank), edges, (8, 64)), network.abort)
    assert sorted(edge for of_rank in times for edge in of_rank) == sorted(edges)
    assert all(len(taken) == 2 and min(taken) > 0 for of_rank in times for taken in of_rank.values())


def test_a_line_through_transfers() -> None:
    exact = fitted_link([(size, 0.5 + size / 100) for size in (1, 50, 200)])
    assert exact.latency == pytest.approx(0.5)
    assert exact.bandwidth == pytest.approx(100)
    assert fitted_link([(1, 0.5), (100, 0.5)]).bandwidth == float("inf")
    assert fitted_link([(10, 0.01), (100, 1.0)]).latency == 0


# --- training stays as it is


@pytest.mark.parametrize(
    ("num_chunks", "split", "fields"),
    [
        (1, False, {}),
        (1, True, {"pipeline_schedule": "zb_h1", "overlap_p2p_comm": True}),
        (2, False, {"batch_p2p_comm": True}),
        (2, True, {"pipeline_schedule": "zb_v"}),
        (1, False, {"variable_seq_lengths": True}),
        (1, False, {"sequence_slices": 3, "pipeline_schedule": "seq_1f1b"}),
        (2, False, {"pipeline_schedule": "dualpipe_v", "overlapped_forward_backward": in_turn}),
        *((1, False, {"kind": kind}) for kind in HOSTILE_NETWORKS),
    ],
)
def test_numbers_are_equal_to_the_bit(num_chunks: int, split: bool, fields: dict[str, Any]) -> None:
    measured = train(2, num_chunks, split=split, measure=2, **fields)
    assert measured.difference(train(2, num_chunks, split=split, **{**fields, "kind": MemoryNetwork})) == 0
    assert isinstance(found().values.activation, tuple)
    assert found().values.transfer > 0


def test_a_model_is_measured_once_and_evaluation_is_left_out() -> None:
    def written(rank: Rank) -> list[bool]:
        model, found = rank.model(), []
        for forward_only in (False, True, True, False, False, False, False):
            rank.step(model, forward_only=forward_only)
            found.append(os.path.exists("megatron_pp_measured.json"))
            Path("megatron_pp_measured.json").unlink(missing_ok=True)
        return found

    assert pipeline(1, 1, 2, written, measure=1) == [[False, False, False, True, False, False, False]]


def test_nothing_is_measured_by_default() -> None:
    train(2, measure=0)
    assert os.listdir() == []


# --- what goes wrong


class _FailsWhenAsked(torch.nn.Linear):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("asked")
        return super().forward(x)


def test_a_model_whose_measurement_does_not_end_is_freed() -> None:
    def is_freed(rank: Rank) -> bool:
        model = rank.model(lambda stage: _FailsWhenAsked(4, 4))
        split_weight_grad(model)
        rank.step(model)
        for module in model[0].modules():
            module.fails = True  # in the step that counts bytes
        with pytest.raises(ValueError, match="asked"):
            rank.step(model)
        known = weakref.ref(model[0])
        del model, module
        gc.collect()
        return known() is None

    assert pipeline(1, 1, 2, is_freed, measure=3, pipeline_schedule="zb_h1") == [True]


def test_a_file_that_cannot_be_written_is_an_error_before_any_communication() -> None:
    Path("file").touch()
    with pytest.raises(ScheduleInputError, match=r"measure_out is 'file/out\.json', which cannot be written"):
        train(2, measure=1, measure_out="file/out.json", kind=NothingMayPass)
    os.mkdir("folder")
    with pytest.raises(ScheduleInputError, match="Is a directory"):
        train(1, measure=1, measure_out="folder")


def test_a_disk_that_fails_later_does_not_end_training(caplog: pytest.LogCaptureFixture) -> None:
    def make_folder(stage: int, x: torch.Tensor, block: Any) -> torch.Tensor:
        Path("out.json").mkdir(exist_ok=True)
        return block(x)

    train(1, measure=1, measure_out="out.json", block=of_stage(make_folder))
    assert "the measurements of config.measure are lost: out.json" in caplog.text


@pytest.mark.parametrize("value", [-1, 1.5, True, "many"])
def test_impossible_numbers_of_steps(value: Any) -> None:
    with pytest.raises((ConfigError, ScheduleInputError), match="measure is"):
        train(1, measure=value)


def test_a_run_too_short_to_measure_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    measuring = Measuring(3, "out.json")
    measuring.progress.measured = 1
    with caplog.at_level(logging.WARNING):
        measuring.progress.at_exit()
    assert "after 1 of the 3 steps of config.measure" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"forwards": 1}, "measured values forwards are not known"),
        ({"units": {"time": "h"}}, "unit of time is 'h'; it must be ms or s"),
        ({"units": {"speed": "h"}}, "values of units speed are not known"),
        ({"network": 3}, "network is 3; it must be an object"),
        ({"network": {"links": [[0, 1]]}}, "links are .*lists of 4 numbers"),
        ({"network": {"latency": -1}}, "latency is -1"),
        ({"copies": {"to_host": "fast"}}, "to_host is 'fast'"),
    ],
)
def test_measured_files_with_faults_are_refused(content: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        MeasuredFile.from_dict(content)

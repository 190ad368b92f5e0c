"""Steps of several modules with ranks as threads, over networks that expose early releases and wrong orders."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron_pp.comm.p2p_communicator import P2PCommunicator
from megatron_pp.errors import ScheduleInputError
from megatron_pp.features.measuring.metrics import StepMetrics
from megatron_pp.features.modules.modules_runner import ModulesRunner
from megatron_pp.features.modules.modules_step import ModulesPipeline, forward_backward_modules
from megatron_pp.testing.adversarial_transports import LastMomentNetwork, PoisoningNetwork, ShuffledNetwork
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.threads import ThreadGroup, run_ranks
from testkit.models.module_models import RankModel, Setup, config_of, forward_step, in_one_process
from testkit.streams import StreamNetwork, StreamReport, virtual_cuda
from tests.functional_tests.numbers.several_modules import SETUPS, assert_equal, steps_of

# All ranks are in one graph, and have gradients.
APART = ("equal replicas", "fan-in of unequal batches", "evaluation", "outputs kept")
JOINED = {name: setup for name, setup in SETUPS.items() if name not in APART}
NETWORKS = (LastMomentNetwork, PoisoningNetwork, ShuffledNetwork)


def run(setup: Setup, network: MemoryNetwork) -> list[list[Any]]:
    def rank_main(rank: int) -> list[Any]:
        pipeline = ModulesPipeline(setup.modules, setup.topology, rank=rank)
        communicator = P2PCommunicator(ThreadGroup(rank, network.size), config_of(setup), network.transport(rank))
        with network.running(rank):
            return steps_of(setup, pipeline, rank, p2p_communicator=communicator)

    return run_ranks(network.size, rank_main, network.abort)


def size_of(setup: Setup) -> int:
    return 1 + max(rank for module in setup.modules for line in module.ranks for stage in line for rank in stage)


@pytest.mark.parametrize("pollable", [False, True])
@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("name", JOINED)
def test_numbers_hold_over_hostile_networks(name: str, kind: Any, pollable: bool) -> None:
    setup = JOINED[name]
    network = kind(size_of(setup), seed=1 + pollable, pollable=pollable)
    assert_equal(setup, run(setup, network), in_one_process(setup))


@pytest.mark.parametrize("name", JOINED)
def test_no_stream_races_on_virtual_devices(name: str) -> None:
    setup = JOINED[name]
    reference = in_one_process(setup)
    for seed in (0, 1):
        network = StreamNetwork(size_of(setup), seed=seed)
        with virtual_cuda():
            found = run(setup, network)
        report = StreamReport.of(network, [])
        assert not report.races, str(report)
        assert_equal(setup, found, reference)


@pytest.mark.parametrize("name", ["fan-in", "an encoder in the bubbles"])
def test_every_rank_gets_its_compute_and_wait_times(name: str) -> None:
    told: list[tuple[int, StepMetrics]] = []
    setup = dataclasses.replace(SETUPS[name], config={"metrics": lambda *numbers: told.append(numbers)})
    assert_equal(setup, run(setup, MemoryNetwork(size_of(setup))), in_one_process(setup))
    assert sorted(step for step, _ in told) == sorted([1, 2] * size_of(setup))
    assert all(0 < numbers.compute < numbers.pipeline for _, numbers in told)


@pytest.mark.parametrize("fields", [{"p2p_debug": True}, {"max_pending_sends": 4}, {"batch_p2p_comm": True}])
def test_settings_change_no_number(fields: dict[str, Any]) -> None:
    setup = dataclasses.replace(SETUPS["fan-in"], config=fields)
    assert_equal(setup, run(setup, MemoryNetwork(size_of(setup))), in_one_process(setup))


def test_outputs_are_dropped_once_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every send of an output over, its data are gone before its backward."""
    setup = dataclasses.replace(SETUPS["fan-out"], config={"deallocate_pipeline_outputs": True})
    kept: list[Any] = []
    backward = ModulesRunner._backward

    def looks(runner: ModulesRunner, at: Any) -> None:
        if runner.edges["F"][at.chunk].sent:
            kept.append(runner.outputs[(at.chunk, at.mb)]["vision"])
        backward(runner, at)

    monkeypatch.setattr(ModulesRunner, "_backward", looks)
    run(setup, MemoryNetwork(size_of(setup)))
    assert len(kept) == setup.microbatches * setup.steps
    assert not any(hasattr(one, "data") for one in kept), "edges of the graph, no tensors"


def test_a_rank_outside_all_modules_raises_an_error() -> None:
    setup = SETUPS["an encoder"]
    model = RankModel(setup, 0)
    model.config = config_of(setup)
    with pytest.raises(ScheduleInputError, match="rank 7 is in no module"):
        forward_backward_modules(
            ModulesPipeline(setup.modules, setup.topology, rank=7),
            forward_step_func=forward_step("llm"),
            data_iterator=model.batches(0),
            model=model,
            num_microbatches=1,
        )

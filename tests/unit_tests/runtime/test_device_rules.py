"""Which of the device's rules the engine plans for, and what it does under them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.common import log_once
from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import PlanError
from megatron_pp.features.pairs.pair_runner import in_turn
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.spec import DEVICE_SYNC, ON_NCCL, ONE_QUEUE, STATIC_BUFFERS, PlanSpec
from megatron_pp.plan.ir.tasks import Task
from megatron_pp.runtime import host
from megatron_pp.runtime.engine.executor import PlanExecutor
from megatron_pp.runtime.model_checks import queue_advice
from megatron_pp.runtime.model_checks.queue_advice import QUEUES_VARIABLE
from megatron_pp.testing.adversarial_transports import LastMomentNetwork
from megatron_pp.testing.memory_transport import MemoryNetwork, MemoryTransport
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.toy import ToyData, reference_run, toy_config
from testkit.inputs.plan_text import edited, save_plan
from testkit.stand_ins.timers import Timers
from testkit.thread_runs.race_support import exact_data, network_for, run_plan


class DeviceNetwork(MemoryNetwork):
    """Says that it is NCCL, so that the engine plans for a device. A rank has one transport for all steps."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.kept: dict[int, MemoryTransport] = {}

    def transport(self, rank: int) -> MemoryTransport:
        transport = self.kept.setdefault(rank, super().transport(rank))
        transport.backend, transport.pollable = "nccl", True
        return transport


SYNCHRONISED = (*ON_NCCL, DEVICE_SYNC)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> set[PlanSpec]:
    """The specs of the plans that are run."""
    specs: set[PlanSpec] = set()

    def noted(spec: PlanSpec, announce: Any) -> Any:
        specs.add(spec)
        return build_plan(spec, announce)

    monkeypatch.setattr(host, "build_plan", noted)
    return specs


@pytest.mark.parametrize(
    ("fields", "rules"),
    [
        ({}, ON_NCCL),
        ({"timers": Timers(1)}, ON_NCCL),
        ({"timers": Timers(2)}, SYNCHRONISED),
        ({"timers": Timers(2), "device_sync": False}, (ONE_QUEUE,)),
        ({"device_sync": True}, SYNCHRONISED),
        ({"device_sync": False}, (ONE_QUEUE,)),
        ({"cuda_graph_impl": "local"}, ON_NCCL),
        ({"cuda_graph_impl": "transformer_engine"}, (*ON_NCCL, STATIC_BUFFERS)),
    ],
)
def test_on_nccl_the_plan_is_for_the_rules_that_the_config_implies(
    planned: set[PlanSpec], fields: dict[str, Any], rules: tuple[str, ...]
) -> None:
    """In every step, the first one included."""
    data = ToyData(4)
    expected = reference_run(4, data)
    on_device, elsewhere = DeviceNetwork(2), MemoryNetwork(2)
    for network, wanted in ((on_device, rules), (on_device, rules), (elsewhere, ())):
        planned.clear()
        result = run_in_threads(2, 2, data, network=network, overlap_p2p_comm=True, **fields)
        assert {spec.device for spec in planned} == {wanted}
        assert result.difference(expected) == 0.0


@pytest.mark.parametrize(("given", "warned"), [(None, False), (True, False), (False, True)])
def test_receives_that_can_hang_are_warned_of(
    caplog: pytest.LogCaptureFixture, given: bool | None, warned: bool
) -> None:
    log_once._log.cache_clear()
    run_in_threads(2, 2, ToyData(4), network=DeviceNetwork(2), overlap_p2p_comm=True, device_sync=given)
    said = [record.message for record in caplog.records if "config.device_sync is False" in record.message]
    assert len(said) == warned
    assert all("two ranks that wait so at the same time hang" in sentence for sentence in said)


@pytest.mark.parametrize("policy", [{"overlap_p2p_comm": True}, {"batch_p2p_comm": True}, {"batch_p2p_comm": False}])
def test_steps_of_varying_shapes_go_out_in_grouped_calls(planned: set[PlanSpec], policy: dict[str, bool]) -> None:
    data = ToyData(4, variable=True)
    result = run_in_threads(2, 2, data, network=DeviceNetwork(2), **policy)
    assert all(spec.grouped for spec in planned)
    assert result.difference(reference_run(4, data)) == 0.0


def test_a_file_that_hangs_in_one_queue_is_refused_on_nccl_and_runs_on_gloo(tmp_path: Path) -> None:
    plan = build_plan(PlanSpec("interleaved_1f1b", 2, 2, 2))
    path = tmp_path / "early.json"
    save_plan(edited(plan, 0, "move RECV_F1.1 behind RECV_F1.0"), path)
    fields: dict[str, Any] = {"pipeline_schedule": str(path), "overlap_p2p_comm": True}
    data = ToyData(2)
    assert run_in_threads(2, 2, data, **fields).difference(reference_run(4, data)) == 0.0
    with pytest.raises(PlanError, match=r"deadlock under one_queue: rank 0 waits at RECV_F1\.1 for rank 1"):
        run_in_threads(2, 2, data, network=DeviceNetwork(2), **fields, device_sync=False)
    with pytest.raises(PlanError, match=r"deadlock under one_queue and any_wait: rank 0 waits at RECV_F1\.1, which"):
        run_in_threads(2, 2, data, network=DeviceNetwork(2), **fields)


class NotesWhatItDefers(PlanExecutor):
    deferred_ops: set[str]

    def _free(self, at: Task) -> None:
        super()._free(at)
        self.deferred_ops.update(later.op for _, later in self.deferred)


@pytest.mark.parametrize("device", [(), (STATIC_BUFFERS,)])
def test_a_gradient_in_a_static_buffer_is_released_where_the_plan_says(device: tuple[str, ...]) -> None:
    """Elsewhere a transport that can be asked has its releases put off while their sends are under way."""
    noting = type("Noting", (NotesWhatItDefers,), {"deferred_ops": set()})
    plan = build_plan(PlanSpec("interleaved_1f1b", 2, 2, 4, device=device))
    run_plan(plan, exact_data(4), network_for(plan, LastMomentNetwork, seed=1, pollable=True), executor=noting)
    assert noting.deferred_ops == {ins.FREE_F} | (set() if device else {ins.FREE_B})


@pytest.mark.parametrize(
    ("schedule", "fields", "streams"),
    [
        ("1f1b", {}, 5),  # of the middle rank: compute, and two one-way channels to either side
        ("zb_v", {}, 9),  # on a V, two more to either side
        ("1f1b", {"overlapped_forward_backward": in_turn}, 6),  # the other half of a pair
        ("zb_v", {"p2p_channels": "shared"}, 2),
        ("zb_v", {"overlap_p2p_comm": False, "batch_p2p_comm": True}, 2),
    ],
)
def test_the_streams_of_the_pipeline_are_counted(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    schedule: str,
    fields: dict[str, Any],
    streams: int,
) -> None:
    """With two queues fewer than these there is a warning, once; with as many none."""
    chunks = 2 if schedule == "zb_v" else 1
    fields = {"pipeline_schedule": schedule, "overlap_p2p_comm": True, **fields}
    for queues, warnings in ((max(2, streams - 1), streams > 2), (streams, False)):
        monkeypatch.setenv(QUEUES_VARIABLE, str(queues))
        log_once._log.cache_clear()
        queue_advice._kept_advice.cache_clear()
        caplog.clear()
        network = DeviceNetwork(3, fields.get("p2p_channels") != "shared")
        run_in_threads(3, chunks, ToyData(4), network=network, **fields)
        said = [record.message for record in caplog.records if QUEUES_VARIABLE in record.message]
        assert len(said) == warnings
        assert all(f"is {queues}: the pipeline uses {streams} streams: some share a queue" in s for s in said)


def test_tensor_parallel_layers_need_one_queue_before_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(QUEUES_VARIABLE, "8")
    plan = build_plan(PlanSpec("1f1b", 2, 1, 4))
    for capability, needed in (((9, 0), True), ((10, 0), False)):
        queue_advice._kept_advice.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, now=capability: now)
        for field in ("tensor_model_parallel_size", "context_parallel_size"):
            config = StepSettings.from_config(toy_config(**{field: 2}))
            advice = queue_advice.advice_on_queues(plan, config, P2PCore(DeviceNetwork(2).transport(0), config))
            assert (advice is not None and "before Blackwell" in advice) == needed
    assert queue_advice.advice_on_queues(plan, config, P2PCore(MemoryNetwork(2).transport(0), config)) is None


class Sharded(torch.nn.Module):
    """A chunk that Megatron-FSDP has wrapped."""

    ddp_config = SimpleNamespace(use_megatron_fsdp=True)


@pytest.mark.parametrize(
    ("fields", "spec", "chunks"),
    [
        ({"overlap_moe_expert_parallel_comm": True}, {}, ()),
        ({}, {"overlap_pairs": True}, ()),
        ({}, {"fsdp_collectives": "per_step"}, ()),
        ({}, {}, (Sharded(),)),
    ],
    ids=["experts", "pairs", "FSDP2", "Megatron-FSDP"],
)
def test_experts_and_fsdp_need_more_than_one_queue(
    fields: dict[str, Any], spec: dict[str, Any], chunks: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's arguments have the same rule. With tensor parallel layers before Blackwell the user has to choose."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    plan = replace(build_plan(PlanSpec("1f1b", 2, 1, 4)), spec=PlanSpec("1f1b", 2, 1, 4, **spec))

    def advice(queues: str | None, **more: Any) -> str | None:
        queue_advice._kept_advice.cache_clear()
        monkeypatch.delenv(QUEUES_VARIABLE, raising=False)
        if queues is not None:
            monkeypatch.setenv(QUEUES_VARIABLE, queues)
        config = StepSettings.from_config(toy_config(**fields, **more))
        return queue_advice.advice_on_queues(plan, config, P2PCore(DeviceNetwork(2).transport(0), config), chunks)

    said = advice("1")
    assert said is not None
    assert said.endswith("; set it to 32")
    assert "cannot overlap with compute" in said
    assert advice("32") is None
    both = advice(None, tensor_model_parallel_size=2)
    assert both is not None
    assert both.endswith("; set it to 1 or to 32")
    assert advice("1", tensor_model_parallel_size=2) is None
    assert advice("32", tensor_model_parallel_size=2) is None


# -- the advice on CUDA_DEVICE_MAX_CONNECTIONS -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "streams", "needs_one", "words"),
    [
        (None, 5, False, "is not set, which means 8 hardware queues: enough for the pipeline's 5 streams, but"),
        (None, 9, False, "is not set, which means 8 hardware queues: the pipeline uses 9 streams: some"),
        (None, 5, True, "before Blackwell, tensor and context parallel layers overlap as intended only in the order"),
        ("1", 5, False, "is 1: a transfer that waits for its peer can hold compute back, and nothing in this run ne"),
        ("8", 9, False, "is 8: the pipeline uses 9 streams: some share a queue and wait for each other"),
        ("8", 9, True, "is 8: before Blackwell, tensor and context parallel layers overlap as intended only"),
        ("none", 2, False, "is none: no number of hardware queues; it must be a whole number from 1 to 32"),
        ("64", 2, True, "is 64: no number of hardware queues; it must be a whole number from 1 to 32"),
    ],
)
def test_queue_advice_is_logged_once_if_the_setting_does_not_suit_the_run(
    value: str | None, streams: int, needs_one: bool, words: str
) -> None:
    advice = queue_advice.queue_advice(streams, needs_one, environ={} if value is None else {QUEUES_VARIABLE: value})
    assert advice is not None
    assert advice.startswith(f"{QUEUES_VARIABLE} is ")
    assert words in advice
    assert advice.endswith(("from 1 to 32", "; set it to 1" if needs_one else "; set it to 32"))


@pytest.mark.parametrize(("value", "streams", "needs_one"), [("1", 9, True), ("8", 8, False), ("32", 9, False)])
def test_no_queue_advice_is_logged_if_the_setting_suits_the_run(value: str, streams: int, needs_one: bool) -> None:
    assert queue_advice.queue_advice(streams, needs_one, environ={QUEUES_VARIABLE: value}) is None

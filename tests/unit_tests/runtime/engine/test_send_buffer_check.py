"""Debug mode: every early release is named with rank, chunk, microbatch and both instructions; a sound engine is not
troubled, and nothing is there when off.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.config.model_config import ModelParallelConfig
from megatron_pp.errors import P2PShapeError, PipelineError, SendBufferError, WireMismatchError
from megatron_pp.features.p2p_debug.send_buffer_check import WatchedExecutor, checksum
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.instruction import POST_OF, RECV_F, SEND_F
from megatron_pp.plan.ir.instruction_text import parse_instruction
from megatron_pp.plan.ir.spec import BATCHED, Plan, PlanSpec
from megatron_pp.plan.ir.tasks import Task
from megatron_pp.runtime import host
from megatron_pp.runtime.engine.executor import PlanExecutor
from megatron_pp.runtime.run_step import executor_for
from megatron_pp.testing.adversarial_transports import LastMomentNetwork
from megatron_pp.testing.memory_transport import MemoryTransport
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.toy import ToyBlock, ToyData, reference_run
from testkit.inputs.plan_text import edited, index_of
from testkit.models.blocks import of_stage
from testkit.mutants.executor_mutants import EARLY_RELEASES, DeallocatesWhatItDefers, OwnsNothing
from testkit.thread_runs.race_support import PlanRun, exact_data, network_for, run_plan
from testkit.thread_runs.step_runs import Rank, every_policy, pipeline

SPECS = {
    "1f1b": PlanSpec("1f1b", 3, 1, 8),
    "interleaved": PlanSpec("interleaved_1f1b", 2, 2, 8),
    "batched": PlanSpec("1f1b", 3, 1, 8, policy=BATCHED),
    "zb_v": PlanSpec("zb_v", 3, 2, 8),
}


def watched(mutant: type[PlanExecutor]) -> type[PlanExecutor]:
    """``mutant`` under watch."""
    return type(f"Watched{mutant.__name__}", (WatchedExecutor, mutant), {})


def run(spec: PlanSpec, executor: type[PlanExecutor], pollable: bool = False, **more: Any) -> PlanRun:
    plan = build_plan(spec)
    network = network_for(plan, LastMomentNetwork, seed=2, pollable=pollable)
    return run_plan(plan, exact_data(spec.num_microbatches), network, executor=executor, **more)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("mutant", EARLY_RELEASES)
def test_every_early_release_is_named(mutant: type[PlanExecutor], name: str) -> None:
    with pytest.raises(SendBufferError) as caught:
        run(SPECS[name], watched(mutant), pollable=mutant is DeallocatesWhatItDefers)
    error = caught.value
    posted = parse_instruction(error.posted_by)
    assert posted.op == ("SEND_B" if "Gradient" in mutant.__name__ else "SEND_F")
    assert (posted.chunk, posted.mb) == (error.chunk, error.microbatch)
    assert 0 <= error.rank < SPECS[name].pipeline_size
    for part in (
        f"rank {error.rank}",
        f"chunk {error.chunk}",
        f"microbatch {error.microbatch}",
        error.posted_by,
        error.broken_by,
    ):
        assert part in str(error)
    at = parse_instruction(error.broken_by)
    if mutant.__name__ in ("ReleaseBeforeWait", "NeverWaits", "DropsGradientInFlight"):
        assert (POST_OF[at.op], at.chunk, at.mb) == (posted.op, posted.chunk, posted.mb)


class WritesToOutput(PlanExecutor):
    """The model, or a hook, changes an output in place after it was sent."""

    through_data = False
    microbatch = 3

    def _send_f(self, at: Task) -> None:
        super()._send_f(at)
        if at.mb == self.microbatch:
            output = self.outputs[at.key].detach()
            (output.data if self.through_data else output).add_(1.0)


class WritesUnseen(WritesToOutput):
    """The same where autograd's version counter does not notice."""

    through_data = True


class WritesUnseenOnTheFirstRank(WritesUnseen):
    """There the first FREE_F stands before the gradient, and where it is put off, the backward comes first."""

    microbatch = 0

    def _send_f(self, at: Task) -> None:
        if self.rank == 0:
            super()._send_f(at)
        else:
            PlanExecutor._send_f(self, at)


@pytest.mark.parametrize("mutant", [WritesToOutput, WritesUnseen])
def test_a_write_in_flight_is_named(mutant: type[PlanExecutor]) -> None:
    with pytest.raises(SendBufferError, match="written to") as caught:
        run(SPECS["1f1b"], watched(mutant))
    assert (caught.value.posted_by, caught.value.microbatch) == ("SEND_F0.3", 3)
    assert caught.value.broken_by == ("SEND_F0.3" if mutant is WritesToOutput else "FREE_F0.3")


def test_a_write_is_found_when_a_backward_uses_the_output_up() -> None:
    """With the FREE_F put off: what was sent is compared when its gradient has come back."""
    spec = PlanSpec("1f1b", 3, 1, 8, overlap_pairs=True)
    with pytest.raises(SendBufferError, match="written to") as caught:
        run(spec, watched(WritesUnseenOnTheFirstRank), pollable=True)
    assert (caught.value.posted_by, caught.value.broken_by) == ("SEND_F0.0", "B0.0")


def test_without_the_check_a_write_in_flight_changes_gradients() -> None:
    result = run(SPECS["1f1b"], WritesUnseen).result
    assert result.difference(run(SPECS["1f1b"], PlanExecutor).result) > 0


def test_released_memory_is_poisoned_before_it_goes() -> None:
    """Whoever looks at the memory of a released output sees NaN: here through an alias that the test has of it."""
    aliases: list[tuple[torch.Tensor, float]] = []

    class KeepsAnAlias(WatchedExecutor):
        def _free(self, at: Task) -> None:
            super()._free(at)
            aliases.extend((there, float(there.flatten()[0])) for there in self.returned)

    network_run = run(SPECS["1f1b"], KeepsAnAlias)
    assert network_run.complaints == []
    assert aliases
    assert all(before == before for _, before in aliases)
    # The alias itself is the tensor that the watch holds, so to the watch the memory looks free.
    assert all(there.isnan().all() for there, _ in aliases)


# The first config stands for Megatron's own, which has no such field.
@pytest.mark.parametrize("config", [SimpleNamespace(), ModelParallelConfig(), SimpleNamespace(p2p_debug=False)])
@pytest.mark.parametrize("variable", ["", "1"])
def test_the_environment_turns_it_on_for_any_config_that_does_not_turn_it_off(
    config: Any, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off there is no trace of it."""
    monkeypatch.setenv("MEGATRON_PP_P2P_DEBUG", variable)
    is_on = variable == "1" and getattr(config, "p2p_debug", None) is not False
    communicator = P2PCore(MemoryTransport(LastMomentNetwork(1), 0), config)
    assert (communicator.wire is not None) == is_on
    assert executor_for(communicator) is (WatchedExecutor if is_on else PlanExecutor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
def test_checksum_sees_any_one_element(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 30).to(dtype)
    before = checksum(tensor)
    assert torch.equal(before, checksum(tensor.clone()))
    for k in range(len(tensor)):
        changed = tensor.clone()
        changed[k] = 0
        assert not torch.equal(before, checksum(changed))


def test_the_watch_keeps_nothing_alive() -> None:
    """Otherwise it would hide what it watches: without ownership, an early release must reach the network as freed
    memory.
    """
    with pytest.raises(PipelineError):
        run(SPECS["1f1b"], watched(EARLY_RELEASES[0]), core=OwnsNothing)
    network = LastMomentNetwork(3, seed=1)
    plan = build_plan(SPECS["1f1b"])
    run_plan(plan, exact_data(8), network, executor=WatchedExecutor, core=OwnsNothing)
    assert network.violations == []


def test_toy_block_saves_no_output() -> None:
    """What the poisoning relies on in these tests: nothing but the schedule holds an output."""
    out = ToyBlock(0)(torch.ones(1, 1, 4))
    assert torch._C._storage_Use_Count(out.untyped_storage()._cdata) == 2


# -- the wire check: a message that is not the expected one is named, with what came ----------------------------------


def _swapped_on_rank_0(spec: PlanSpec, announce: object = None) -> Plan:
    """A plan whose rank 0 sends the activation of microbatch 1 first, then that of microbatch 0."""
    plan = build_plan(spec)
    plan = edited(plan, 0, "move SEND_F0.0 behind SEND_F0.1")  # each release stays behind its send
    late = index_of(plan.programs[0], "FREE_F0.0") < index_of(plan.programs[0], "SEND_F0.0")
    return edited(plan, 0, "move FREE_F0.0 behind SEND_F0.0") if late else plan


@pytest.fixture
def _sent_out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "build_plan", _swapped_on_rank_0)


@pytest.mark.usefixtures("_sent_out_of_order")
@pytest.mark.parametrize("by_environment", [False, True])
def test_a_message_out_of_order_is_named(by_environment: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment turns it on for configs without the field, such as Megatron's own."""
    if by_environment:
        monkeypatch.setenv("MEGATRON_PP_P2P_DEBUG", "1")
    field = {} if by_environment else {"p2p_debug": True}
    with pytest.raises(WireMismatchError) as caught:
        run_in_threads(2, 1, ToyData(2), forward_only=True, overlap_p2p_comm=True, **field)
    text = str(caught.value)
    assert "rank 1 expected the activation of chunk 0 of rank 0, microbatch 0, torch.float32 [3, 2, 4]" in text
    assert "rank 0 sent the activation of chunk 0 of rank 0, microbatch 1" in text
    assert caught.value.field == "microbatch"
    assert caught.value.values == {1: "0", 0: "1"}


@pytest.mark.usefixtures("_sent_out_of_order")
def test_without_the_check_it_trains_on_the_wrong_microbatch() -> None:
    """Why the check exists: the same fault passes in silence, with wrong losses."""
    data = ToyData(2)
    result = run_in_threads(2, 1, data, forward_only=True, overlap_p2p_comm=True)
    assert result.difference(reference_run(2, data, forward_only=True)) > 0.0


@pytest.mark.parametrize("debug", [False, True])
@every_policy
def test_a_wrong_output_shape_is_refused_before_it_is_sent(debug: bool, policy: dict[str, Any]) -> None:
    """Stage 0 gives one row too many."""
    wide = of_stage(lambda stage, x, block: block(x) if stage else torch.cat([block(x), x[:1]]))
    with pytest.raises(P2PShapeError, match=r"chunk 0 for microbatch 0 has shape \[4, 2, 4\].*expects \[3, 2, 4\]"):
        run_in_threads(2, 1, ToyData(2), block=wide, p2p_debug=debug, **policy)


def exchanged(sent: torch.Tensor, fields_of: Any = lambda rank: {}, **fields: Any) -> Any:
    """What rank 1 receives, as [3, 2], of what rank 0 sends."""

    def exchange(rank: Rank) -> Any:
        if rank.rank == 0:
            return rank.communicator.send_forward(sent, False)
        return rank.communicator.recv_forward((3, 2), False)

    return pipeline(2, 1, 0, exchange, fields_of=fields_of, p2p_debug=True, **fields)[1]


@pytest.mark.parametrize("batched", [False, True])
def test_megatron_style_calls_compare_shape(batched: bool) -> None:
    assert torch.equal(exchanged(torch.ones(3, 2), batch_p2p_comm=batched), torch.ones(3, 2))
    with pytest.raises(WireMismatchError, match=r"expected a message, torch.float32 \[3, 2\].*sent .*\[2, 3\]: shape"):
        exchanged(torch.ones(2, 3), batch_p2p_comm=batched)


def test_megatron_style_calls_compare_dtype() -> None:
    with pytest.raises(WireMismatchError, match=r"expected a message, torch.float32.*sent a message, torch.int32"):
        exchanged(torch.ones(3, 2).int(), lambda rank: {"pipeline_dtype": torch.float32 if rank else torch.int32})


def test_wire_stamps_of_send_and_receive_are_equal() -> None:
    """A receive and the send that it belongs to carry one stamp, on every channel of a V."""
    from megatron_pp.features.p2p_debug.wire_check import WireCheck

    plan = build_plan(PlanSpec("zb_v", 2, 2, 4))
    stamps: dict[bool, list[Any]] = {True: [], False: []}
    for rank, program in enumerate(plan.programs):
        check = WireCheck(rank)
        for at in program:
            if at.op in (SEND_F, "SEND_B", RECV_F, "RECV_B"):
                check.source = SimpleNamespace(placement=plan.placement, instruction=at)
                stamps[at.op in (SEND_F, "SEND_B")].append(check.stamp(torch.float32))
    assert stamps[True]
    assert sorted(stamps[True]) == sorted(stamps[False])
    assert len(set(stamps[True])) == len(stamps[True])

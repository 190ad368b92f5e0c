"""Steps that offload: memory as the plan counts it, bits that come back, and what is not offloaded.

``test_differential.py`` has the numbers of all schedules.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_pp.errors import ScheduleInputError
from megatron_pp.features.offload import host_copies as copies
from megatron_pp.features.offload import offload_runner as offload
from megatron_pp.features.offload.offload_instructions import LOAD, OFFLOAD
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.activations import activations_timeline, host_timeline
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.verify.lifetime import LifetimeWalk
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.toy import ToyBlock, ToyData
from testkit.device_runs.stream_runs import on_one_device, plan_on_streams
from testkit.thread_runs.step_runs import pipeline
from tests.unit_tests.runtime import test_memory

# -- memory -----------------------------------------------------------------------------------------------------------


class Keeps(torch.autograd.Function):
    """Saves one large tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(large)
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (large,) = ctx.saved_tensors
        assert float(large[-1]) == 7.0, "what comes back is what was saved"
        return grad * 2.0, None


LARGE = 100_000  # elements


class KeepingBlock(ToyBlock):
    """A block whose forward keeps one large tensor, which ``seen`` knows by its storage."""

    seen: list[StorageWeakRef]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = torch.full((LARGE,), 7.0)
        self.seen.append(StorageWeakRef(large.untyped_storage()))
        return Keeps.apply(super().forward(x), large)


@pytest.mark.parametrize("spec", [PlanSpec("pipe_offload", 2, 2, 8), PlanSpec("gis", 2, 2, 6, offload_chunks=2)])
def test_memory_is_what_the_plan_counts_at_each_instruction(spec: PlanSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors alive on the device, and copies on the host, instruction by instruction."""
    alive: dict[int, list[StorageWeakRef]] = {0: [], 1: []}
    on_device: dict[int, list[int]] = {0: [], 1: []}
    on_host: dict[int, list[int]] = {0: [], 1: []}
    end, see = test_memory.Census.end, test_memory.Census._see

    def ended(self: Any, at: Instruction) -> None:
        rank, kept = self.executor.rank, self.executor.features[-1].kept
        blocks = [block for one in kept.values() for block in one.blocks.values()]
        if at.op == LOAD:
            loaded = kept[(at.stage, at.mb, at.part)].blocks.values()
            alive[rank] += [StorageWeakRef(block.here.untyped_storage()) for block in loaded if block.stop > LARGE]
        on_host[rank].append(sum(block.host is not None and block.stop > LARGE for block in blocks))
        on_device[rank].append(sum(not ref.expired() for ref in alive[rank]))
        end(self, at)
        away = {key for key, one in kept.items() if any(block.memory is None for block in one.blocks.values())}
        inputs = self.executor.inputs.items()
        self.counted[-1] += sum(is_stand_in(x) and key not in away for key, x in inputs)

    def is_stand_in(x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.untyped_storage().nbytes() == x.element_size()

    monkeypatch.setattr(test_memory.Census, "end", ended)
    monkeypatch.setattr(test_memory.Census, "_see", lambda self, x: is_stand_in(x) or see(self, x))
    ranks = {stage: rank for rank, stages in enumerate(build_plan(spec).placement.stages) for stage in stages}

    def block(stage: int) -> KeepingBlock:
        made = KeepingBlock(stage)
        made.seen = alive[ranks[stage]]
        return made

    plan = build_plan(spec)
    for rank, census in enumerate(test_memory.run_counted(spec, block=block)):
        assert census.counted == list(LifetimeWalk(plan, rank).tensors()), "pipeline tensors"
        assert on_device[rank] == list(activations_timeline(plan, rank))
        ones = (1.0,) * plan.placement.num_stages
        assert on_host[rank] == list(host_timeline(plan.programs[rank], plan.placement.stages[rank], ones))
    assert any(max(counts) > 0 for counts in on_host.values())


def test_host_memory_is_pooled() -> None:
    """A second step allocates none."""
    held, addresses = copies.host_copies(torch.device("cpu")), []
    for _ in range(2):
        buffers = [held.buffer(100), held.buffer(100), held.buffer(40)]
        addresses.append({(buffer.data_ptr(), len(buffer)) for buffer in buffers})
        for buffer in buffers:
            held.give_back(buffer)
    assert addresses[0] == addresses[1]
    assert len(addresses[0]) == 3


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_host_memory_of_steps_that_vary_is_bounded(device: str) -> None:
    """By what was in use at one time, rounded up to powers of two."""

    def program() -> tuple[int, int, int]:
        held, rng, most = copies.host_copies(torch.device(device)), random.Random(0), 0
        seen: dict[StorageWeakRef, int] = {}
        for _ in range(1000):
            sizes = [rng.randrange(1 << 8, 1 << 14) for _ in range(rng.randint(1, 8))]
            buffers = list(map(held.buffer, sizes))
            assert [len(buffer) for buffer in buffers] == sizes
            most = max(most, sum(sizes))
            seen |= {StorageWeakRef(buffer.untyped_storage()): buffer.untyped_storage().nbytes() for buffer in buffers}
            for buffer in buffers:
                held.give_back(buffer)
            del buffers, buffer
        return sum(nbytes for storage, nbytes in seen.items() if not storage.expired()), held.held, most

    ((alive, held, most),) = on_one_device(program).results
    assert alive == held < 2 * most


class Counted(copies.HostCopies):
    """Bytes that are asked for at one time: now, and at most."""

    now = most = 0

    def buffer(self, nbytes: int) -> torch.Tensor:
        self.now += nbytes
        self.most = max(self.most, self.now)
        return super().buffer(nbytes)

    def give_back(self, buffer: torch.Tensor) -> None:
        self.now -= len(buffer)
        super().give_back(buffer)


def test_all_chunks_of_all_steps_share_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """One a rank. Lengths vary by a factor of 32; the longest step alone says what the pool may hold."""
    made: list[Any] = []

    class Pool(Counted, copies._ThreadCopies):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            made.append(self)

    monkeypatch.setattr(copies, "host_copies", Pool)
    rng = random.Random(1)
    steps = [ToyData(4, seq_length=rng.randrange(3, 97)) for _ in range(30)]
    fields = {"pipeline_schedule": "gis", "offload_chunks": 2}
    pipeline(2, 2, 4, lambda rank: [rank.run(data=data) for data in steps], **fields)
    assert len(made) == 2
    for pool in made:
        assert pool.now == 0
        assert 0 < pool.held < 2 * pool.most


# -- what is saved ----------------------------------------------------------------------------------------------------


class Recorded:
    """One forward's saved tensors, offloaded and loaded by hand."""

    def __init__(self, *chunks: torch.nn.Module) -> None:
        plan = build_plan(PlanSpec("1f1b", 2, 1, 4, offload_chunks=1))
        self.at = next(task for task in plan.tasks(0) if task.op == OFFLOAD)
        self.offloads = offload.Offloads(
            copies.host_copies(torch.device("cpu")), frozenset({self.at.key}), chunks, lambda at: self.shared
        )
        self.output = torch.tensor(())
        self.shared: Any = ()

    def forward(self, function: Any) -> None:
        def run(at: Any) -> None:
            self.output = function()

        self.offloads.forward(run, self.at)

    def away_and_back(self) -> list[int]:
        """Bytes of the blocks that were copied."""
        self.offloads.offload(self.at)
        sizes = sorted(block.stop - block.start for block in self.offloads.kept[self.at.key].blocks.values())
        self.back()
        return sizes

    def back(self) -> None:
        self.offloads.free(self.at)
        self.offloads.load(self.at)
        self.offloads.wait_load(self.at)
        assert not self.offloads.kept


def test_tensors_that_share_memory_are_copied_once_and_parameters_not_at_all() -> None:
    layer = torch.nn.Linear(32, 32)
    x = torch.randn(64, 32, requires_grad=True)
    step = Recorded(layer)

    def function() -> torch.Tensor:
        both = torch.tanh(layer(x))
        first, second = both.t()[:16], both[:, 16:]  # views of one storage, one not contiguous
        return (first.t() * second).sum() + (both * both).sum() + (x[:2] * x[1:3]).sum()

    function().backward()
    wanted, x.grad = x.grad, None
    weight, layer.weight.grad = layer.weight.grad, None
    step.forward(function)
    assert step.away_and_back() == [64 * 32 * 4, 64 * 32 * 4]  # x, and the output of tanh
    step.output.backward()
    assert torch.equal(x.grad, wanted)
    assert torch.equal(layer.weight.grad, weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_bits_of_any_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(33, 5, dtype=dtype, requires_grad=True)
    step = Recorded()
    step.forward(lambda: (x[1:] * x[:-1].conj()).abs().sum())
    step.away_and_back()
    step.output.backward()
    found, x.grad = x.grad, None
    (x[1:] * x[:-1].conj()).abs().sum().backward()
    assert torch.equal(found, x.grad)


def test_tensors_that_the_user_holds_keep_their_data() -> None:
    held = []
    x = torch.randn(40, requires_grad=True)
    step = Recorded()

    def function() -> torch.Tensor:
        held.append(torch.exp(x))
        return held[0] * held[0]

    step.forward(function)
    value = held[0].detach().clone()
    assert len(step.away_and_back()) == 1
    assert torch.equal(held[0], value)


@pytest.mark.parametrize("when", ["before", "while it is copied", "after"])
def test_an_in_place_change_is_an_error_as_without_offloading(when: str) -> None:
    """After it was copied: of what stays on the device."""
    x, middle, step = torch.randn(64, requires_grad=True), torch.tensor(()), Recorded()

    def function() -> torch.Tensor:
        nonlocal middle
        middle = x * 1.0
        return (middle * middle).sum()

    step.forward(function)
    step.shared = [middle] if when == "after" else ()
    if when != "before":
        step.offloads.offload(step.at)
    with torch.no_grad():
        middle.add_(1)
    if when == "before":
        step.offloads.offload(step.at)
    step.back()
    with pytest.raises(RuntimeError, match=r"shape \[64\] .* was changed by an in-place operation"):
        step.output.backward()


def test_the_stage_of_an_input_still_sees_it() -> None:
    """The engine's own input loses its data; an operation that keeps its argument outside of autograd does not."""
    given = torch.randn(8, 4, requires_grad=True)
    seen = offload.view_of(given)
    value = given.detach().clone()
    offload.stand_in([given])
    assert torch.equal(seen, value)
    assert given.untyped_storage().nbytes() == 4
    (seen * 3.0).sum().backward()
    assert torch.equal(given.grad, torch.full((8, 4), 3.0))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"overlapped_forward_backward": lambda f, b: (f(), b())}, "pairs .* cannot be offloaded"),
        ({"cuda_graph_impl": "transformer_engine"}, "graphs keep activations in buffers of their own"),
        ({"cuda_graph_impl": "local"}, "'local', whose graphs keep activations in buffers of their own"),
        ({"offload_chunks": 2}, "offload_chunks is 2, more than the 1 model chunk"),
        ({"offload_chunks": -1}, "offload_chunks is -1"),
        ({"offload_slots": 0}, "offload_slots is 0"),
    ],
)
def test_tensors_that_cannot_be_offloaded_are_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ScheduleInputError, match=why):
        run_in_threads(2, 1, ToyData(4), **{"pipeline_schedule": "1f1b", "offload_chunks": 1, **fields})


# -- streams ----------------------------------------------------------------------------------------------------------


def _frees_at_once(self: Any, at: Any) -> None:
    for block in self.kept[at.key].blocks.values():
        block.memory = None


def _does_not_wait(self: Any, at: Any) -> None:
    for block in self.kept.pop(at.key).blocks.values():
        self.copies.give_back(block.host)


def _post_without(edge: str) -> Any:
    def post(self: Any, pieces: Any, to_host: bool) -> Any:
        stream, current = self._streams[to_host], torch.cuda.current_stream()
        if (edge == "out") != to_host:
            stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for target, source in pieces:
                target.copy_(source, non_blocking=True)
        done = stream.record_event()
        return lambda: current.wait_event(done)

    return post


@pytest.mark.parametrize(
    ("name", "change", "instruction"),
    [
        ("free", _frees_at_once, "OFFLOAD"),  # memory is reused while it is copied away
        ("wait_load", _does_not_wait, "LOAD"),  # a backward reads what is not back yet
        ("post", _post_without("out"), "OFFLOAD"),  # what a forward has not written yet is copied
        ("post", _post_without("back"), "LOAD"),  # memory is written that an operation before still reads
    ],
    ids=["free", "wait", "out", "back"],
)
def test_a_missing_wait_is_a_race(name: str, change: Any, instruction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload.Offloads if hasattr(offload.Offloads, name) else copies._StreamCopies, name, change)
    report = plan_on_streams(PlanSpec("pipe_offload", 2, 2, 6, offload_chunks=2))
    assert any(r.first.instruction.startswith(instruction) or r.second.instruction.startswith(instruction)
               for r in report.races), str(report)  # fmt: skip

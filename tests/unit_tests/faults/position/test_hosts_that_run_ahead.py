"""The guard on virtual devices whose hosts run ahead, as on NCCL: who is named, where it is, and how soon."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from megatron_pp.errors import PipelinePeerError, PipelineStallError
from megatron_pp.faults.causes.positions import awaited_ranks, pending_peers
from megatron_pp.faults.guard import FaultGuard
from megatron_pp.faults.position import device_events
from megatron_pp.faults.position.device_events import CompletedWork, EventQueries
from megatron_pp.faults.position.host_ahead import TrackerOfDevice
from megatron_pp.faults.position.tracker import Place, Tracker
from megatron_pp.faults.store.records import DONE, IN_STEP, Process, Progress, decode
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.testing.pipeline import placement_of, toy_step
from megatron_pp.testing.toy import ToyBlock, ToyData, toy_chunks, toy_config
from testkit.device_runs.nccl_runs import on_nccl
from testkit.streams import LATER_STEPS, StreamNetwork
from testkit.streams.device import current_device
from testkit.streams.timelines import Clock

pytestmark = pytest.mark.usefixtures("nccl_settings")
SIZE = 3
SECONDS = 10.0  # "within seconds", on a loaded machine; p2p_timeout is far longer where this counts
Raised = dict[int, BaseException | None]


class Kernel:
    """Work on a stream that goes on until ``finished``."""

    def __init__(self) -> None:
        self.finished = False
        self.end: Clock = {}


class Job:
    """``SIZE`` ranks on NCCL that train, and have loaded their kernels. ``stops``: (rank, step, n), where in its nth
    forward a kernel begins that goes on until ``kernel.finished``; the host fails there in forward number ``raises``.
    """

    def __init__(self, stops: tuple[int, int, int], raises: int = -1, **fields: Any) -> None:
        self.network = StreamNetwork(SIZE, seed=None, run_ahead=True, rules=LATER_STEPS)
        self.fields = {"overlap_p2p_comm": True, "p2p_timeout": 600.0, **fields}
        self.config = toy_config(**self.fields)
        self.stops, self.raises = stops, raises
        self.kernel = Kernel()
        self.hosts_are_through = threading.Barrier(SIZE)
        self.seconds: dict[int, float] = {}

    def run(self, main: Callable[[int, P2PCommunicator], None], steps: int = 0) -> Raised:
        """What ``main(rank, communicator)`` raises on each rank once all hosts are through ``steps`` steps;
        ``seconds``: how long after that.
        """
        raised: Raised = dict.fromkeys(range(SIZE))

        def train(communicator: P2PCommunicator) -> None:
            rank = communicator.rank
            try:
                for step in range(1, steps + 1):
                    self.step(communicator, step)
                if steps:
                    self.all_hosts_through(rank)
                main(rank, communicator)
            except Exception as error:
                raised[rank] = error
            finally:
                self.seconds[rank] = time.monotonic() - self.seconds.get(rank, time.monotonic())

        on_nccl(self.network, train, **self.fields)
        return raised

    def step(self, communicator: P2PCommunicator, step: int) -> None:
        """Run a step, which is over when the host has left it."""
        rank = communicator.rank
        stops, raises = (self.stops[2], self.raises) if self.stops[:2] == (rank, step) else (-1, -1)
        block = partial(StoppingBlock, stops=stops, raises=raises, kernel=self.kernel)
        chunks = toy_chunks(placement_of(self.config, SIZE, 1), rank, self.config, block)
        toy_step(chunks, ToyData(2 * SIZE), communicator)  # and nobody asks for the loss

    def all_hosts_through(self, rank: int) -> None:
        self.hosts_are_through.wait(30.0)
        self.seconds[rank] = time.monotonic()

    def release(self) -> None:
        self.kernel.finished = True
        self.network.progress()


class StoppingBlock(ToyBlock):
    """A block whose forward number ``stops`` takes as long as ``kernel``. Forward number ``raises`` fails."""

    def __init__(self, stage: int, stops: int, raises: int, kernel: Kernel) -> None:
        super().__init__(stage)
        self.stops, self.raises, self.calls, self.kernel = stops, raises, -1, kernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.raises:
            raise ZeroDivisionError("on the host")
        device = current_device()
        if self.calls == self.stops and device is not None:
            device.stream.wait_for({}, {self.kernel})
        return super().forward(x)


def kill(guard: FaultGuard, gone: Process) -> None:
    """What the others see of this rank is the record of a process that is gone."""
    guard.tracker.process = gone
    time.sleep(3 * guard.heartbeat.pace.beat)  # it is published once more
    guard.heartbeat.store.publish = lambda record: None  # type: ignore[method-assign]


def eventually(is_so: Callable[[], bool]) -> bool:
    until = time.monotonic() + SECONDS
    while not is_so() and time.monotonic() < until:
        time.sleep(0.05)
    return is_so()


# -- who is named ---


@pytest.mark.slow
@pytest.mark.parametrize("is_watched", [True, False], ids=["host waits under the guard", "host waits outside"])
def test_a_rank_that_dies_behind_its_host_is_named_in_seconds(
    is_watched: bool, gone: Process, caplog: pytest.LogCaptureFixture
) -> None:
    """All hosts have come to the end of step 2 and wait for their devices; p2p_timeout is ten minutes."""
    job = Job(stops=(1, 2, 2))

    def main(rank: int, communicator: P2PCommunicator) -> None:
        guard = communicator.transport.guard
        if rank == 1:
            kill(guard, gone)
            return
        with guard.watch("the loss") if is_watched else nullcontext():
            torch.cuda.synchronize()
        job.step(communicator, 3)

    raised = job.run(main, steps=2)
    assert raised[1] is None
    for rank in (0, 2):
        error = raised[rank]
        assert isinstance(error, PipelineStallError)
        assert error.suspects == (1,)
        assert "the process of rank 1" in str(error)
        assert "is in forward of chunk 0, microbatch 2 (F0.2, " in error.progress[1]
        assert job.seconds[rank] < SECONDS
    assert "waits for the activation of chunk 0, microbatch 2 from rank 1" in error.progress[2]
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert is_watched or any("the process of rank 1" in text for text in said)


@pytest.mark.slow
def test_a_hung_device_is_named_with_its_position(caplog: pytest.LogCaptureFixture) -> None:
    """The process of the rank and its host are alive."""
    job = Job(stops=(1, 1, 2), p2p_timeout=0.8, compute_timeout=2.0)

    def main(rank: int, communicator: P2PCommunicator) -> None:
        with communicator.transport.guard.watch("the loss"):
            if rank == 1:
                threading.Timer(6.0, job.release).start()
            torch.cuda.synchronize()

    for rank, error in job.run(main, steps=1).items():
        assert isinstance(error, PipelineStallError), rank
        assert error.suspects == (1,)
        assert "held up by rank 1" in str(error)
        assert "is in forward of chunk 0, microbatch 2 (F0.2, " in error.progress[1]


@pytest.mark.slow
def test_a_slow_device_is_not_accused_and_the_position_is_that_of_the_device() -> None:
    job = Job(stops=(1, 2, 2), p2p_timeout=0.5, compute_timeout=60.0)
    seen: dict[int, str] = {}

    def main(rank: int, communicator: P2PCommunicator) -> None:
        time.sleep(2.0)
        here = communicator.transport.guard.tracker.observe()
        seen[rank] = "" if here is None else f"{here.step} {here.state} {here.text}"
        if job.hosts_are_through.wait(30.0) == 0:
            job.release()
        torch.cuda.synchronize()
        job.step(communicator, 3)

    assert set(job.run(main, steps=2).values()) == {None}
    assert seen == {0: "2 in_step WAIT_B0.1", 1: "2 in_step F0.2", 2: "2 in_step WAIT_F0.2"}


@pytest.mark.slow
def test_a_step_is_over_when_the_device_is_done() -> None:
    job = Job(stops=(1, 1, 2))
    states: dict[int, list[str]] = {rank: [] for rank in range(SIZE)}

    def main(rank: int, communicator: P2PCommunicator) -> None:
        guard = communicator.transport.guard
        key = guard.heartbeat.store.own_key("Progress", rank)

        def published() -> str:
            return decode(Progress, guard.heartbeat.store.store.get(key)).state

        time.sleep(1.0)
        states[rank].append(published())
        if job.hosts_are_through.wait(30.0) == 0:
            job.release()
        eventually(lambda: published() == DONE)
        states[rank].append(published())

    assert set(job.run(main, steps=1).values()) == {None}
    assert set(map(tuple, states.values())) == {(IN_STEP, DONE)}


@pytest.mark.slow
def test_a_watched_phase_outside_steps_ends_when_the_device_is_done() -> None:
    job = Job(stops=(-1, -1, -1))

    def main(rank: int, communicator: P2PCommunicator) -> None:
        job.step(communicator, 1)
        tracker = communicator.transport.guard.tracker
        torch.cuda.synchronize()
        assert eventually(lambda: tracker.where() is None)
        with communicator.transport.guard.watch("the optimizer step"):
            job.network.devices[rank].stream.wait_for({}, {job.kernel})
        time.sleep(0.5)
        assert tracker.where().phase == "the optimizer step"
        job.all_hosts_through(rank)
        job.release()
        assert eventually(lambda: tracker.where() is None)

    assert set(job.run(main).values()) == {None}


@pytest.mark.slow
def test_a_device_may_be_at_a_send_that_is_not_received() -> None:
    """As many sends are pending as may be; the host has freed them all."""
    job = Job(stops=(-1, -1, -1), pipeline_schedule="gpipe")
    texts: dict[int, str] = {}

    def main(rank: int, communicator: P2PCommunicator) -> None:
        job.step(communicator, 1)
        torch.cuda.synchronize()
        job.all_hosts_through(rank)
        job.network.held = lambda work: work.rank == 0 and not job.kernel.finished
        job.hosts_are_through.wait(30.0)
        job.step(communicator, 2)
        job.all_hosts_through(rank)
        time.sleep(1.0)
        texts[rank] = communicator.transport.guard.tracker.observe().text
        job.hosts_are_through.wait(30.0)
        job.release()
        torch.cuda.synchronize()

    assert set(job.run(main).values()) == {None}
    assert texts[0].startswith("FREE_F0."), texts
    assert texts[1].startswith("WAIT_F0.")


def test_an_exception_has_the_place_of_the_host() -> None:
    """The device is two forwards behind the host."""
    job = Job(stops=(1, 1, 2), raises=4)

    def main(rank: int, communicator: P2PCommunicator) -> None:
        try:
            job.step(communicator, 1)
            torch.cuda.synchronize()
        finally:
            job.release()
        job.step(communicator, 2)

    raised = job.run(main)
    assert isinstance(raised[1], ZeroDivisionError)
    for rank in (0, 2):
        error = raised[rank]
        assert isinstance(error, PipelinePeerError)
        assert (error.rank, error.instruction) == (1, "F0.4")


# -- which peers may hold it up ---


def test_pending_peers_lists_ranks_with_unfinished_transfers() -> None:
    program = build_plan(PlanSpec("1f1b", 4, 1, 4, policy="overlap")).programs[1]
    text = [str(at) for at in program]
    at = text.index("B0.0")
    assert pending_peers(program, 0, 0) == {0}  # the first receive
    assert pending_peers(program, at, len(program)) == {0, 2}
    assert pending_peers(program, len(program), len(program)) == {0}  # the gradients that were freed last
    assert pending_peers((), 0, 0) == set()


def test_compute_that_stands_still_waits_for_all_pending_peers() -> None:
    """In one hardware queue it may be behind a transfer."""
    tracker = TrackerOfDevice(1, 4, completed := CompletedWork())
    plan = build_plan(PlanSpec("1f1b", 4, 1, 4, policy="overlap"))
    at = next(k for k, one in enumerate(plan.programs[1]) if str(one) == "F0.0")
    tracker.begin(SimpleNamespace(plan=plan, position=at))
    assert awaited_ranks(tracker) == (0,)
    assert completed.oldest is None
    blocking = Tracker(1, 4)
    blocking.begin(SimpleNamespace(plan=plan, position=at))
    assert awaited_ranks(blocking) == ()


# -- the rules of CUDA ---


class Runtime:
    """CUDA's runtime library, whose calls are noted; events are over, or not, or a kernel has failed."""

    codes: ClassVar[dict[int, int]] = {7: 0, 8: 600, 9: 700}

    def __init__(self, name: str) -> None:
        self.calls: list[tuple[str, Any]] = [("load", name)]

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            (given,) = arguments or (None,)
            self.calls.append((name, getattr(getattr(given, "_obj", given), "value", given)))
            return self.codes[given] if name == "cudaEventQuery" else 0

        vars(self)[name] = call
        return call


def test_the_watch_asks_on_its_own_device_without_the_interpreter_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Event.query`` keeps it, and would make a context on device 0; and graphs may be captured meanwhile."""
    chosen: list[Any] = []
    runtimes: list[Runtime] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: runtimes.append(Runtime(name)) or runtimes[0])
    queries = EventQueries(torch.device("cuda", 3))
    queries.begin()
    assert queries.is_over(SimpleNamespace(cuda_event=7))
    assert not queries.is_over(SimpleNamespace(cuda_event=8))
    with pytest.raises(RuntimeError, match="cudaEventQuery returned 700"):
        queries.is_over(SimpleNamespace(cuda_event=9))
    assert chosen == [torch.device("cuda", 3)]
    assert runtimes[0].calls == [
        ("load", "libcudart.so.13"),
        ("cudaThreadExchangeStreamCaptureMode", 2),  # cudaStreamCaptureModeRelaxed
        ("cudaEventQuery", 7),
        ("cudaEventQuery", 8),
        ("cudaGetLastError", None),
        ("cudaEventQuery", 9),
    ]


def test_torch_is_queried_if_cudas_runtime_library_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "999.0")
    queries = EventQueries()
    queries.begin()
    assert "libcudart.so.999" in caplog.text
    assert "capturing a CUDA graph may fail" in caplog.text
    assert queries.is_over(SimpleNamespace(query=lambda: True))


def test_the_watchdog_chooses_the_device_of_its_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[str, Any]] = []
    begin = EventQueries.begin

    def noted(queries: EventQueries) -> None:
        begun.append((threading.current_thread().name, queries._device))
        begin(queries)

    monkeypatch.setattr(EventQueries, "begin", noted)
    job = Job(stops=(-1, -1, -1))

    def main(rank: int, communicator: P2PCommunicator) -> None:
        job.step(communicator, 1)
        assert eventually(lambda: len(begun) == SIZE)

    assert set(job.run(main).values()) == {None}
    assert sorted(begun, key=str) == [("megatron_pp events", torch.device("cuda", rank)) for rank in range(SIZE)]
    assert not [device.process.contexts for device in job.network.devices if device.process.contexts]


def test_a_device_that_fails_has_no_marks_left() -> None:
    class Failed:
        def record(self, stream: Any = None) -> None: ...

        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    completed = CompletedWork()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "Event", Failed)
        completed.mark(Place(1, None, 0, "the step"))
    assert completed.oldest is not None
    completed.poll()
    assert completed.oldest is None


def test_a_closed_watch_asks_nothing_more_once_its_query_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process group and its events may be gone by then."""
    begun, goes_on, asked = threading.Event(), threading.Event(), []

    def is_over(queries: EventQueries, event: Any) -> bool:
        asked.append(event)
        begun.set()
        return goes_on.wait(30.0)

    monkeypatch.setattr(EventQueries, "is_over", is_over)
    monkeypatch.setattr(EventQueries, "begin", lambda queries: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream=None: None))
    monkeypatch.setattr(device_events, "_JOIN", 0.05)
    completed = CompletedWork()
    for text in ("the step", "the loss"):
        completed.mark(Place(1, None, 0, text))
    completed.ask()
    assert begun.wait(30.0)
    completed.close()
    assert completed._thread is not None
    assert completed._thread.is_alive(), "no thread that is in a call of CUDA can be ended"
    goes_on.set()
    completed._thread.join(30.0)
    assert not completed._thread.is_alive()
    assert len(asked) == 1

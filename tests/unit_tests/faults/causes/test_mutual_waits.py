"""Operations that wait for each other's messages: which are found, how soon, and which are only slow.

Hosts run ahead of virtual devices. An operation that waits for its device is one that synchronises it.
"""

from __future__ import annotations

import inspect
import io
import threading
import time
import tokenize
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from megatron_pp.errors import PipelineStallError
from megatron_pp.faults.causes.mutual_waits import find, in_words, mutual_waits
from megatron_pp.faults.store.records import DONE, ENTERING, IN_STEP, NO_HOST, Progress
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.spec import DEVICE_RULES, DEVICE_SYNC, Plan, PlanSpec
from megatron_pp.testing.pipeline import placement_of, toy_step
from megatron_pp.testing.toy import ToyBlock, ToyData, toy_chunks, toy_config
from testkit.autograd_thread import autograd_thread
from testkit.device_runs.nccl_runs import on_nccl
from testkit.streams import DeviceRules, StreamNetwork
from testkit.streams.device import current_device
from testkit.streams.network import NO_MORE_RULES
from testkit.streams.timelines import Clock
from testkit.sweeps import drawn

pytestmark = pytest.mark.usefixtures("nccl_settings")
TIMEOUT = 1.5
SOON = 8.0  # seconds more, on a loaded machine
PATIENCE = 60.0  # compute_timeout
LONG = 2.5 * TIMEOUT

# -- plans ---


def place(plan: Plan, rank: int, text: str) -> int:
    return [str(at) for at in plan.programs[rank]].index(text)


def posted_ahead(size: int = 2, schedule: str = "1f1b", chunks: int = 1, microbatches: int = 4) -> Plan:
    return build_plan(PlanSpec(schedule, size, chunks, microbatches))


def cycle(plan: Plan, places: dict[int, str], stuck: set[int] | None = None) -> list[tuple[int, str, int]]:
    hosts = {rank: place(plan, rank, text) for rank, text in places.items()}
    return [
        (rank, str(at), sender)
        for rank, at, sender in mutual_waits(plan, hosts, set(places if stuck is None else stuck))
    ]


def test_two_operations_in_the_steady_state_of_1f1b() -> None:
    plan = posted_ahead()
    assert cycle(plan, {0: "F0.2", 1: "B0.1"}) == [(0, "RECV_B0.1", 1), (1, "RECV_F0.2", 0)]


@pytest.mark.parametrize(
    ("places", "stuck"),
    [
        ({0: "F0.2", 1: "B0.1"}, {0}),  # rank 1 computes: it will send
        ({0: "F0.2", 1: "B0.1"}, {1}),
        ({0: "F0.2", 1: "B0.1"}, set()),
        ({0: "F0.0", 1: "F0.0"}, None),  # rank 0 has posted nothing
        ({0: "F0.1", 1: "F0.0"}, None),  # rank 1 has its input
    ],
)
def test_slow_ranks_form_no_cycle(places: dict[int, str], stuck: set[int] | None) -> None:
    assert cycle(posted_ahead(), places, stuck) == []


def test_an_operation_that_waits_for_a_message_behind_itself_is_a_cycle() -> None:
    """No plan of ours posts a receive so early: rank 1 needs all inputs before it sends the first gradient."""
    plan = build_plan(PlanSpec("gpipe", 2, 1, 4))
    first = list(plan.programs[0])
    receive = next(one for one in first if one.op == ins.RECV_B)
    first.remove(receive)
    first.insert([str(one) for one in first].index("F0.3"), receive)
    early = replace(plan, programs=(tuple(first), plan.programs[1]))
    hosts = {0: place(early, 0, "F0.3"), 1: len(early.programs[1])}
    found = mutual_waits(early, hosts, {0})
    assert [(rank, str(one), sender) for rank, one, sender in found] == [(0, str(receive), 1), (1, "RECV_F0.3", 0)]
    words = in_words(early, hosts, {0}, found)
    assert "rank 0 is in F0.3 (forward of chunk 0, microbatch 3) and has posted" in words
    assert "rank 1 waits for RECV_F0.3, whose message rank 0 has not sent" in words


SAFE = [rule for rule in ("any_wait", DEVICE_SYNC) if rule in DEVICE_RULES]


@pytest.mark.parametrize("rule", SAFE)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb_h1", "gis_h", "breadth_first", "zb_v"])
def test_plans_for_devices_that_wait_have_no_cycle_wherever_hosts_are(schedule: str, rule: str) -> None:
    """Both ranks wait for their devices, in every pair of operations in turn."""
    chunks = 1 if schedule in ("1f1b", "zb_h1") else 2
    plan = build_plan(PlanSpec(schedule, 2, chunks, 4, device=(rule,)))
    compute = [[k for k, at in enumerate(program) if at.op in ins.COMPUTE_OPS] for program in plan.programs]
    for first in compute[0]:
        for second in compute[1]:
            assert not mutual_waits(plan, {0: first, 1: second}, {0, 1}), (first, second)


def test_a_cycle_of_waits_is_described_in_words() -> None:
    plan = posted_ahead()
    hosts = {0: place(plan, 0, "F0.2"), 1: place(plan, 1, "B0.1")}
    words = in_words(plan, hosts, {0, 1}, mutual_waits(plan, hosts, {0, 1}))
    assert (
        "rank 0 is in F0.2 (forward of chunk 0, microbatch 2) and has posted RECV_B0.1, whose message rank 1" in words
    )
    assert (
        "rank 1 is in B0.1 (backward of chunk 0, microbatch 1) and has posted RECV_F0.2, whose message rank 0" in words
    )
    assert "Set config.device_sync to None" in words


# -- what ranks publish ---


def at(plan: Plan, rank: int, text: str, idle: float, step: int = 1, state: str = IN_STEP) -> Progress:
    return Progress(step, state, host=place(plan, rank, text), host_idle=idle)


def test_only_hosts_that_have_waited_long_enough_count() -> None:
    plan = posted_ahead()
    both = {0: at(plan, 0, "F0.2", 61.0), 1: at(plan, 1, "B0.1", 61.0)}
    assert find(plan, 1, both, 60.0)[1] == (0, 1)
    assert find(plan, 1, both, 62.0) == ("", ())
    for other in (
        at(plan, 1, "B0.1", 2.0),  # seen to move
        at(plan, 1, "B0.1", 61.0, step=2),  # it has issued all of this step
        Progress(1, DONE),
        Progress(1, ENTERING, host=0, host_idle=61.0),
        Progress(0, IN_STEP, host=3, host_idle=61.0),
        Progress(1, IN_STEP, 3, "B0.1", 61.0, host=NO_HOST),  # a host that does not run ahead
    ):
        assert find(plan, 1, {**both, 1: other}, 60.0) == ("", ()), other
    assert find(plan, 1, {0: both[0]}, 60.0) == ("", ())


# -- steps ---


Acts = dict[str, Callable[[], object]]


class Kernel:
    """Work on a stream that goes on until it is ``finished``."""

    def __init__(self) -> None:
        self.finished = False
        self.end: Clock = {}


class Steps:
    """A step of ``size`` ranks; ``at[rank]``: what happens in which of its operations."""

    def __init__(self, size: int, at: dict[int, Acts], rules: DeviceRules = NO_MORE_RULES) -> None:
        self.size, self.at = size, at
        self.network = StreamNetwork(size, seed=None, run_ahead=True, rules=rules)
        self.seconds: dict[int, float] = {}
        self.ended: dict[int, float] = {}  # when, by the monotonic clock
        self.kernel_ended = 0.0
        self.raised: dict[int, BaseException | None] = dict.fromkeys(range(size))

    def run(self, **fields: Any) -> None:
        fields = {"overlap_p2p_comm": True, "p2p_timeout": TIMEOUT, "compute_timeout": PATIENCE, **fields}
        config = toy_config(**fields)

        def main(communicator: P2PCommunicator) -> None:
            rank = communicator.rank
            chunks = toy_chunks(
                placement_of(config, self.size, 1), rank, config, partial(Block, acts=self.at.get(rank, {}))
            )
            began = time.monotonic()
            try:
                toy_step(chunks, ToyData(2 * self.size), communicator)
                with communicator.transport.guard.watch("the loss"):
                    torch.cuda.synchronize()
            except Exception as error:
                self.raised[rank] = error
            self.ended[rank] = time.monotonic()
            self.seconds[rank] = self.ended[rank] - began

        on_nccl(self.network, main, **fields)


class Block(ToyBlock):
    """Forward and backward number n do ``acts["Fn"]`` and ``acts["Bn"]``."""

    def __init__(self, stage: int, acts: Acts) -> None:
        super().__init__(stage)
        self.acts = acts
        self.forwards, self.backwards = -1, -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        self.acts.get(f"F{self.forwards}", list)()
        output = super().forward(x)
        output.register_hook(self.in_backward)
        return output

    def in_backward(self, gradient: torch.Tensor) -> None:
        self.backwards += 1
        self.acts.get(f"B{self.backwards}", list)()


def synchronize() -> None:
    torch.cuda.synchronize()


def compute_for_long() -> None:
    """On the host, in Python, as a compiler does."""
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        list(tokenize.generate_tokens(io.StringIO(inspect.getsource(inspect)).readline))


AHEAD = {"device_sync": False}


@pytest.mark.slow
@pytest.mark.parametrize("queries_block", [False, True], ids=["queries answer", "queries block"])
@pytest.mark.parametrize(
    ("size", "at"),
    [(2, {0: "F2", 1: "B1"}), (2, {0: "F3", 1: "B2"}), (4, {0: "F4", 1: "B1"}), (4, {2: "F3", 3: "B2"})],
    ids=str,
)
def test_two_waits_are_named_within_the_timeout(
    size: int, at: dict[int, str], queries_block: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Not after compute_timeout, though both hosts compute; and the step ends."""
    acts = {rank: {name: synchronize} for rank, name in at.items()}
    steps = Steps(size, acts, DeviceRules(queries_block=queries_block))
    steps.run(**AHEAD)
    (first, one), (second, two) = at.items()
    for rank, error in steps.raised.items():
        assert isinstance(error, PipelineStallError), rank
        assert set(error.suspects) == {first, second}
        text = str(error)
        assert f"rank {first} is in F0.{one[1:]} (forward of chunk 0, microbatch {one[1:]}) and has posted" in text
        assert f"rank {second} is in B0.{two[1:]} (backward of chunk 0, microbatch {two[1:]}) and has posted" in text
        assert "Set config.device_sync to None" in text
        assert steps.seconds[rank] < TIMEOUT + SOON
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert any("gives up its step: no rank has made progress for" in text for text in said), "before it is raised"


@pytest.mark.slow
def test_hosts_that_compute_are_not_a_stall() -> None:
    """In a cycle, both for longer than p2p_timeout: as in a compilation on all ranks."""
    steps = Steps(2, {0: {"F2": compute_for_long}, 1: {"B1": compute_for_long}})
    steps.run(**AHEAD)
    assert steps.raised == {0: None, 1: None}


@pytest.mark.slow
@pytest.mark.parametrize("thread", drawn(["the caller's thread", "autograd's thread"], 1))
def test_a_wait_for_a_host_that_computes_is_not_a_stall(thread: str) -> None:
    """On a GPU the host computes in a thread of autograd, and the thread that runs the step waits for it. A run of the
    tests draws one of the two threads."""
    steps = Steps(2, {0: {"F2": synchronize}, 1: {"B1": compute_for_long}})
    with autograd_thread() if thread == "autograd's thread" else nullcontext():
        steps.run(**AHEAD)
    assert steps.raised == {0: None, 1: None}


def with_a_long_kernel(acts: Acts) -> Steps:
    """Rank 0 waits for its device with a receive posted; a kernel of rank 1's takes longer than p2p_timeout."""
    kernel = Kernel()

    def launch() -> None:
        device = current_device()
        assert device is not None
        device.stream.wait_for({}, {kernel})

    steps = Steps(2, {0: {"F2": synchronize}, 1: {"F1": launch, **acts}})

    def end() -> None:
        kernel.finished = True
        steps.kernel_ended = time.monotonic()
        steps.network.progress()

    timer = threading.Timer(LONG, end)
    timer.start()
    steps.run(**AHEAD)
    timer.join()
    return steps


@pytest.mark.slow
def test_a_wait_for_a_device_that_computes_is_not_a_stall() -> None:
    assert with_a_long_kernel({}).raised == {0: None, 1: None}


@pytest.mark.slow
def test_a_host_that_waits_for_its_own_kernel_is_part_of_no_cycle_before_that_ends() -> None:
    """Then it is: rank 1 waits for its device, too, and so for its receive."""
    steps = with_a_long_kernel({"B1": synchronize})
    for rank, error in steps.raised.items():
        assert isinstance(error, PipelineStallError), rank
        assert 0.8 * TIMEOUT < steps.ended[rank] - steps.kernel_ended < TIMEOUT + SOON


@pytest.mark.slow
def test_waits_in_a_plan_that_posts_nothing_ahead_end() -> None:
    steps = Steps(2, {0: {"F2": synchronize}, 1: {"B1": synchronize}})
    steps.run(device_sync=True)
    assert steps.raised == {0: None, 1: None}

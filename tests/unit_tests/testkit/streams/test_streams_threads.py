"""Threads of a rank on a virtual device: which device they are on, and who holds whom up."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from megatron_pp.faults.position.places import instruction_at
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.testing.threads import run_ranks
from testkit.device_runs.stream_runs import on_one_device
from testkit.streams import DeviceRules, StreamNetwork, virtual_cuda
from testkit.virtual_groups import VirtualNCCL
from tests.unit_tests.faults.position.test_hosts_that_run_ahead import Kernel


def in_a_thread(program: Callable[[], object]) -> None:
    thread = threading.Thread(target=program, name="a thread")
    thread.start()
    thread.join()


def run_in_threads(program: Callable[[torch.cuda.Event], object], one_device: bool = False) -> None:
    """``program(event)`` in a thread of each of two ranks."""
    network = StreamNetwork(2, seed=None, rules=DeviceRules(one_device=one_device))

    def run(rank: int) -> None:
        with network.running(rank):
            event = torch.cuda.Event()
            event.record()
            in_a_thread(lambda: program(event))

    with virtual_cuda():
        run_ranks(2, run)


def query_of_the_runtime(event: torch.cuda.Event) -> int:
    library = ctypes.CDLL("libcudart.so.13")
    return int(library.cudaEventQuery(event.cuda_event))


def query_of_torch(event: torch.cuda.Event) -> bool:
    return event.query()


ASKS: list[Callable[[torch.cuda.Event], object]] = [
    query_of_torch,
    query_of_the_runtime,
    lambda event: torch.cuda.synchronize(),
    lambda event: torch.cuda.set_device(0),
]


@pytest.mark.parametrize("asks", ASKS)
def test_a_thread_that_has_not_chosen_its_device_makes_a_context_on_device_0(
    asks: Callable[[torch.cuda.Event], object],
) -> None:
    words = "^rank 1: .* in thread 'a thread' makes a context on cuda:0, where the process uses cuda:1$"
    with pytest.raises(RuntimeError, match=words):
        run_in_threads(asks)
    run_in_threads(asks, one_device=True)


@pytest.mark.parametrize("asks", ASKS[:3])
def test_a_thread_that_has_chosen_its_device_makes_no_context_on_device_0(
    asks: Callable[[torch.cuda.Event], object],
) -> None:
    def program(event: torch.cuda.Event) -> None:
        torch.cuda.set_device(event._device.place)
        assert torch.cuda.current_device() == event._device.rank
        asks(event)

    run_in_threads(program)


def test_a_tensor_on_a_device_by_its_number_makes_one_where_that_is_another_ranks() -> None:
    network = StreamNetwork(2)
    found: dict[int, list[str]] = {}

    def run(rank: int) -> None:
        with network.running(rank):
            devices = [torch.zeros(1, device="cuda").device, torch.zeros(1).cuda().device]
            assert torch.cuda.device_count() == 2
            torch.zeros(1, device="cuda:1")
            found[rank] = list(map(str, devices))

    words = "^rank 0: a tensor in thread 'rank 0' makes a context on cuda:1"
    with virtual_cuda(), pytest.raises(RuntimeError, match=words):
        run_ranks(2, run)
    assert found == {0: ["cuda:0"] * 2, 1: ["cuda:1"] * 2}


@pytest.mark.parametrize("query", [query_of_torch, query_of_the_runtime])
def test_a_query_blocks_while_a_thread_waits_for_the_device(query: Callable[[torch.cuda.Event], object]) -> None:
    """``Event.query`` stops the other threads of the process too, at their next call in the package."""
    network = StreamNetwork(1, seed=None, run_ahead=True, rules=DeviceRules(queries_block=True))
    process = network.devices[0].process
    kernel = Kernel()
    asks, answered, moved = threading.Event(), threading.Event(), threading.Event()
    seen: list[bool] = []

    def ask(event: torch.cuda.Event) -> None:
        while not process._waiting:
            time.sleep(0.01)
        asks.set()
        query(event)
        answered.set()

    def other() -> None:
        asks.wait(10.0)
        time.sleep(0.2)
        instruction_at(build_plan(PlanSpec("1f1b", 1, 1, 1)), 0, 0)
        moved.set()

    def finish() -> None:
        asks.wait(10.0)
        time.sleep(1.0)
        seen.extend([answered.is_set(), moved.is_set()])
        kernel.finished = True
        network.progress()

    def run(rank: int) -> None:
        with network.running(rank):
            event = torch.cuda.Event()
            event.record()
            network.devices[0].stream.wait_for({}, [kernel])
            threads = [threading.Thread(target=ask, args=(event,)), threading.Thread(target=other)]
            for thread in threads:
                thread.start()
            torch.cuda.synchronize()
            for thread in threads:
                thread.join()

    release = threading.Thread(target=finish)
    release.start()
    with virtual_cuda():
        run_ranks(1, run, network.abort)
    release.join()
    assert seen == [False, query is query_of_the_runtime]
    assert answered.is_set()
    assert moved.is_set()


def while_a_launch_waits(call: Callable[[StreamNetwork, torch.cuda.Event], object], rules: DeviceRules) -> bool:
    """Whether ``call`` of another thread returns while the host is in the first launch of a kernel, and so waits for a
    receive whose send was not posted yet."""
    network = StreamNetwork(2, seed=None, rules=rules)
    process, returned, goes_on = network.devices[0].process, threading.Event(), threading.Event()
    seen: list[bool] = []

    def other(event: torch.cuda.Event) -> None:
        while not process._waiting:
            time.sleep(0.01)
        call(network, event)
        returned.set()

    def run(rank: int) -> None:
        with network.running(rank):
            tensor, transport = torch.empty(4), network.transport(rank)
            if rank == 1:
                seen.append(returned.wait(1.0))
                transport.isend(tensor, 0, "A")
                return
            event = torch.cuda.Event()
            event.record()
            transport.irecv(tensor, 1, "A")
            thread = threading.Thread(target=other, args=(event,))
            thread.start()
            torch.ones(4).tanh()
            thread.join()
            goes_on.set()

    with virtual_cuda():
        run_ranks(2, run, network.abort)
    assert returned.is_set()
    assert goes_on.is_set()
    return seen[0]


CALLS: dict[str, Callable[[StreamNetwork, torch.cuda.Event], object]] = {
    "query": lambda network, event: query_of_the_runtime(event),
    "query of torch": lambda network, event: query_of_torch(event),
    "memory": lambda network, event: torch.cuda.mem_get_info(),
    "abort": lambda network, event: VirtualNCCL.abort(
        SimpleNamespace(device=network.devices[0], network=network, _communicators={})  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_launch_that_waits_holds_the_lock_under_which_other_calls_wait(call: str) -> None:
    assert while_a_launch_waits(CALLS[call], DeviceRules(context_lock=False))
    assert not while_a_launch_waits(CALLS[call], DeviceRules())


def test_a_wait_for_the_device_holds_no_lock() -> None:
    """``cudaDeviceSynchronize``: other threads may ask meanwhile, unless ``queries_block``."""
    network = StreamNetwork(1, seed=None, run_ahead=True)
    kernel, asked = Kernel(), threading.Event()

    def other(event: torch.cuda.Event) -> None:
        while not network.devices[0].process._waiting:
            time.sleep(0.01)
        query_of_torch(event)
        asked.set()
        kernel.finished = True
        network.progress()

    def run(rank: int) -> None:
        with network.running(rank):
            event = torch.cuda.Event()
            event.record()
            network.devices[0].stream.wait_for({}, [kernel])
            thread = threading.Thread(target=other, args=(event,))
            thread.start()
            torch.cuda.synchronize()
            thread.join()

    with virtual_cuda():
        run_ranks(1, run, network.abort, 20.0)
    assert asked.is_set()


WAITS: list[Callable[[torch.cuda.Event], object]] = [
    query_of_torch,
    lambda event: event.synchronize(),
    lambda event: torch.cuda.synchronize(),
    lambda event: torch.ones(1).item(),
]


@pytest.mark.parametrize("waits", WAITS)
def test_asking_the_device_ends_a_capture(waits: Callable[[torch.cuda.Event], object]) -> None:
    def program() -> bool:
        event, graph = torch.cuda.Event(), torch.cuda.CUDAGraph()
        event.record()
        graph.capture_begin()
        assert torch.cuda.is_current_stream_capturing()
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            waits(event)
        with pytest.raises(RuntimeError, match="previous error during capture"):
            graph.capture_end()
        waits(event)
        return torch.cuda.is_current_stream_capturing()

    assert on_one_device(program).results == [False]


def test_an_event_of_a_capture_is_never_queried() -> None:
    def program() -> None:
        event, graph = torch.cuda.Event(), torch.cuda.CUDAGraph()
        graph.capture_begin()
        event.record()
        graph.capture_end()
        with pytest.raises(RuntimeError, match="not permitted"):
            query_of_torch(event)
        assert query_of_the_runtime(event) == 900

    on_one_device(program)

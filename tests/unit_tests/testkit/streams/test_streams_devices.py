"""What a virtual device does with streams, events, memory and autograd, each in a program of a few lines."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint

from megatron_pp.testing.threads import run_ranks
from megatron_pp.testing.toy import ToyData
from testkit.device_runs.stream_runs import on_one_device, toy_step_on_streams
from testkit.streams import StreamNetwork, StreamReport, virtual_cuda


def kinds(report: StreamReport) -> list[str]:
    return [race.kind for race in report.races]


@pytest.mark.parametrize("edge_in", [True, False])
@pytest.mark.parametrize("edge_out", [True, False])
def test_streams_wait_only_if_the_program_says_so(edge_in: bool, edge_out: bool) -> None:
    def program() -> torch.Tensor:
        x = torch.ones(100)
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        if edge_in:
            side.wait_stream(current)
        with torch.cuda.stream(side):
            y = x * 2
        if edge_out:
            current.wait_stream(side)
        return y + 1

    assert kinds(on_one_device(program)) == ["write/read"] * ((not edge_in) + (not edge_out))


@pytest.mark.parametrize("synchronize", ["event", "stream", "device", "item", "query", "nothing"])
def test_work_that_the_host_has_waited_for_is_finished(synchronize: str) -> None:
    def program() -> torch.Tensor:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            y = torch.ones(100)
            event = torch.cuda.current_stream().record_event()
            if synchronize == "item":
                y.sum().item()
        if synchronize == "event":
            event.synchronize()
        elif synchronize == "stream":
            side.synchronize()
        elif synchronize == "query":
            assert side.query()
        elif synchronize == "device":
            torch.cuda.synchronize()
        return y + 1

    assert kinds(on_one_device(program)) == (["write/read"] if synchronize == "nothing" else [])


def test_an_event_orders_what_was_issued_before_it_only() -> None:
    def program() -> torch.Tensor:
        x, side, event = torch.zeros(100), torch.cuda.Stream(), torch.cuda.Event()
        event.record()
        x.add_(1)
        event.wait(side)
        with torch.cuda.stream(side):
            return x + 1

    report = on_one_device(program)
    assert kinds(report) == ["write/read"]
    assert report.races[0].first.what == "add_"


def test_accesses_to_different_bytes_of_one_tensor_do_not_race() -> None:
    def program() -> None:
        x, side = torch.zeros(100), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x[50:].add_(1)
        x[:50].add_(1)
        x[40:60].add_(1)

    report = on_one_device(program)
    assert [(race.first.what, race.second.what) for race in report.races] == [("add_", "add_")]


@pytest.mark.parametrize("record", [False, True])
def test_freed_memory_is_reused_on_its_own_stream_without_waiting(record: bool) -> None:
    def program() -> torch.Tensor:
        x, side = torch.ones(200), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        if record:
            x.record_stream(side)
        del x
        return torch.zeros(100), y

    report = on_one_device(program)
    assert kinds(report) == ([] if record else ["read/reuse"])


def test_memory_of_another_stream_is_not_reused() -> None:
    def program() -> torch.Tensor:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x = torch.ones(200)
            del x
        return torch.zeros(200)

    assert on_one_device(program).reused == 0


@pytest.mark.parametrize("non_blocking", [False, True])
def test_pinned_memory_is_the_hosts(non_blocking: bool) -> None:
    def program() -> list[float]:
        staging = torch.ones(10, device="cpu").pin_memory()
        on_device = torch.empty(10, device="cuda")
        assert (staging.device.type, on_device.device.type) == ("cpu", "cuda")
        on_device.copy_(staging, non_blocking=non_blocking)
        staging.fill_(3.0)
        return on_device.tolist()

    assert kinds(on_one_device(program)) == (["read/write"] if non_blocking else [])


@pytest.mark.parametrize("move", [lambda m: m.to("cuda"), lambda m: m.cuda(), lambda m: m.to(torch.device("cuda", 0))])
def test_a_model_moves_to_the_device_and_back(move: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    def program() -> list[str]:
        model = torch.nn.Linear(2, 2, device="cpu")
        kinds = [model.weight.device.type]
        kinds.append(move(model).weight.device.type)
        kinds.append(model(torch.ones(1, 2)).device.type)
        kinds.append(model.cpu().weight.double().device.type)
        return [*kinds, torch.ones(1).to(model.weight).device.type, torch.ones(1, device="cpu").cuda().device.type]

    report = on_one_device(program)
    assert not report.races, str(report)
    assert report.results == [["cpu", "cuda", "cuda", "cpu", "cpu", "cuda"]]


def test_a_backward_runs_where_its_forward_ran() -> None:
    def program() -> tuple[list[bool], bool]:
        layer, side, seen = torch.nn.Linear(4, 4), torch.cuda.Stream(), []
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            hidden = checkpoint(layer, torch.ones(2, 4, requires_grad=True), use_reentrant=True).tanh()
        torch.cuda.current_stream().wait_stream(side)
        hidden.register_hook(lambda grad: seen.append(torch.cuda.current_stream() == side))
        (hidden * 2).sum().backward()
        layer.weight.grad.add_(1)
        return seen, torch.cuda.current_stream() == torch.cuda.default_stream()

    report = on_one_device(program)
    assert not report.races, str(report)
    assert report.results == [([True], True)]


def test_the_33rd_stream_is_the_first_again() -> None:
    def program() -> tuple[bool, bool]:
        streams = [torch.cuda.Stream() for _ in range(33)]
        return streams[32] == streams[0], torch.cuda.Stream(priority=-1) in streams

    assert on_one_device(program).results == [(True, False)]


def test_torch_is_as_before_afterwards() -> None:
    def state() -> tuple[Any, ...]:
        cuda = torch.cuda.Stream, torch.cuda.is_available, torch.Tensor.record_stream
        return (*cuda, os.environ.get("MEGATRON_PP_NVTX"), is_in_torch_dispatch_mode())

    before = state()
    report = on_one_device(lambda: (torch.cuda.is_available(), torch.ones(1).is_cuda, torch.cuda.current_device()))
    assert report.results == [(True, True, 0)]
    toy_step_on_streams("1f1b", 3, ToyData(3))
    assert state() == before
    assert not torch.ones(1).is_cuda


def test_code_that_asks_for_any_accelerator_gets_the_virtual_device() -> None:
    """torch 2.15's optimizers ask for the stream of ``torch.accelerator``."""

    def program() -> list[bool]:
        any_kind, cuda, side = torch.accelerator, torch.cuda, torch.cuda.Stream()
        any_kind.synchronize()
        any_kind.set_device_index(0)
        with torch.cuda.stream(side):
            same = any_kind.current_stream() == side and not any_kind.current_stream().is_capturing()
        return [
            same,
            any_kind.is_available() and any_kind.device_count() == cuda.device_count(),
            any_kind.current_accelerator() == torch.device("cuda"),
            any_kind.current_device_index() == cuda.current_device(),
        ]

    before = torch.accelerator.current_accelerator()
    assert on_one_device(program).results == [[True] * 4]
    assert torch.accelerator.current_accelerator() == before


# -- transfers, and a host that runs ahead of the device ---------------------------------------------------------------


@pytest.mark.parametrize("reply", [True, False])
def test_an_answer_shows_that_the_question_was_sent(reply: bool) -> None:
    """A match joins both ranks: who has received what was computed from its message may use the memory again."""
    network = StreamNetwork(2)

    def run(rank: int) -> None:
        with network.running(rank):
            transport, tensor, answer = network.transport(rank), torch.ones(4), torch.empty(4)
            if rank == 0:
                transport.isend(tensor, 1, "A")
                if reply:
                    transport.irecv(answer, 1, "G").wait()
                tensor.add_(1)
            else:
                transport.irecv(tensor, 0, "A").wait()
                if reply:
                    transport.isend(tensor * 2, 0, "G").wait()

    with virtual_cuda():
        report = StreamReport.of(network, run_ranks(2, run, network.abort))
    assert kinds(report) == ([] if reply else ["read/write"])


class TwoRanks:
    """Rank 0 sends two tensors to rank 1; what each then sees of the device, step by step."""

    def __init__(self) -> None:
        self.network = StreamNetwork(2, seed=None, run_ahead=True)
        self.network.held = lambda work: True
        self.host_is_ahead = threading.Barrier(2)
        self.released = threading.Event()

    def run(self, rank: int) -> dict[str, Any]:
        with self.network.running(rank):
            transport, peer, tensor = self.network.transport(rank), 1 - rank, torch.full((4,), float(rank + 1))
            post = transport.isend if rank == 0 else transport.irecv
            works = [post(tensor, peer, "A") for _ in range(2)]
            before, after = torch.cuda.Event(), torch.cuda.Event()
            before.record()
            works[0].wait()
            after.record()
            seen: dict[str, Any] = {"behind": [works[0].is_completed(), before.query(), after.query()]}
            if self.host_is_ahead.wait(20.0) == 0:
                self.network.held = lambda work: False
                self.network.progress()
                self.released.set()
            self.released.wait(20.0)
            after.synchronize()
            torch.cuda.synchronize()
            seen["done"] = [works[1].is_completed(), after.query(), torch.cuda.current_stream().query()]
            return {**seen, "got": tensor.tolist()}


def test_the_host_runs_ahead_of_transfers_that_are_held() -> None:
    two = TwoRanks()
    with virtual_cuda():
        sender, receiver = run_ranks(2, two.run, two.network.abort)
    assert sender["behind"] == receiver["behind"] == [False, True, False]
    assert sender["done"] == receiver["done"] == [True, True, True]
    assert receiver["got"] == [1.0] * 4


def test_a_host_that_waits_for_its_device_is_woken_by_an_abort() -> None:
    network = StreamNetwork(2, seed=None, run_ahead=True)

    def run(rank: int) -> str:
        if rank == 1:  # never posts its end
            network.abort("rank 1 was killed")
            return ""
        with network.running(rank):
            network.transport(rank).irecv(torch.empty(4), 1, "A").wait()
            with pytest.raises(RuntimeError, match="aborted: rank 1 was killed"):
                torch.cuda.synchronize()
            return "woken"

    with virtual_cuda():
        assert run_ranks(2, run) == ["woken", ""]


def test_an_event_query_of_another_thread_orders_nothing_for_the_host() -> None:
    """The fault guard's watch asks; the program has not waited for anything."""
    network = StreamNetwork(1, seed=None)

    def run(rank: int) -> list[int]:
        with network.running(rank):
            side, host = torch.cuda.Stream(), network.devices[0].host
            with torch.cuda.stream(side):
                torch.ones(4).add_(1)
                event = torch.cuda.Event()
                event.record()
            steps = [host.steps]
            watch = threading.Thread(target=event.query)
            watch.start()
            watch.join()
            steps.append(host.steps)
            event.query()
            return [*steps, host.steps]

    with virtual_cuda():
        ((before, asked_elsewhere, asked_here),) = run_ranks(1, run)
    assert before == asked_elsewhere < asked_here

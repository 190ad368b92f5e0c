"""What a virtual device does with streams, events, memory and autograd, each in a program of a few lines."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_pp.testing.streams import StreamReport
from tests.harness.stream_runs import on_one_device


def kinds(report: StreamReport) -> list[str]:
    return [race.kind for race in report.races]


@pytest.mark.parametrize("edge_in", [True, False])
@pytest.mark.parametrize("edge_out", [True, False])
def test_streams_wait_for_nobody_unless_told(edge_in: bool, edge_out: bool) -> None:
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


@pytest.mark.parametrize("synchronize", ["event", "stream", "device", "item", "nothing"])
def test_what_the_host_has_waited_for_is_over(synchronize: str) -> None:
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
    before = torch.cuda.Stream, torch.cuda.is_available, torch.Tensor.record_stream
    report = on_one_device(lambda: (torch.cuda.is_available(), torch.ones(1).is_cuda, torch.cuda.current_device()))
    assert report.results == [(True, True, 0)]
    assert before == (torch.cuda.Stream, torch.cuda.is_available, torch.Tensor.record_stream)
    assert not torch.ones(1).is_cuda

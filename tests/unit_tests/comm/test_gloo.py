"""Threads that see gloo's transfers through: in order, ahead of who waits, errors and limits to the one who waits."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from megatron_pp.comm.gloo import waiting_threads as gloo_threads
from megatron_pp.comm.gloo.waiting_threads import ChannelThreads, InterruptedTransferError

PATIENCE = timedelta(seconds=20)


class Posted:
    """torch's work of a transfer that is over when ``go`` is set; ``error`` is what it ends with."""

    def __init__(self, go: threading.Event | None = None, error: Exception | None = None) -> None:
        self.go = go
        self.error = error

    def wait(self) -> bool:
        if self.go is not None:
            self.go.wait(30)
        if self.error is not None:
            raise self.error
        return True


@pytest.fixture
def threads() -> Iterator[ChannelThreads]:
    made = ChannelThreads()
    yield made
    made.close()
    assert not any(thread.is_alive() for thread in made._threads)


def until(condition: Any) -> None:
    end = time.monotonic() + PATIENCE.total_seconds()
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_sends_are_posted_in_order_and_not_by_the_caller(threads: ChannelThreads) -> None:
    posted: list[tuple[int, str]] = []

    def post(number: int) -> Posted:
        posted.append((number, threading.current_thread().name))
        return Posted()

    works = [threads.post("a channel", partial(post, number)) for number in range(20)]
    assert all(work.wait(PATIENCE) for work in works)
    assert posted == [(number, "megatron_pp a channel") for number in range(20)]
    assert all(work.is_completed() for work in works)


def test_a_finished_transfer_is_reported_without_a_wait(threads: ChannelThreads) -> None:
    go = threading.Event()
    work = threads.follow("a channel", Posted(go))
    assert not work.is_completed()
    go.set()
    until(work.is_completed)
    assert work.wait(timedelta(0))


def test_a_small_message_wakes_no_thread_until_it_is_waited_for(threads: ChannelThreads) -> None:
    asked: list[str] = []

    class Small(Posted):
        def wait(self) -> bool:
            asked.append(threading.current_thread().name)
            return True

    works = [threads.follow("a channel", Small(), ahead=False) for _ in range(3)]
    threads.follow("another", Posted()).wait(PATIENCE)
    assert asked == []
    assert works[1].wait(PATIENCE)  # and with it the one before, but not the one behind it
    assert [work.is_completed() for work in works] == [True, True, False]
    assert all(work.wait(PATIENCE) for work in works)
    assert asked == ["megatron_pp a channel"] * 3


def test_channels_do_not_wait_for_each_other(threads: ChannelThreads) -> None:
    go = threading.Event()
    late, soon = threads.follow("one", Posted(go)), threads.follow("another", Posted())
    assert soon.wait(PATIENCE)
    assert not late.is_completed()
    go.set()
    assert late.wait(PATIENCE)


def test_a_transfer_that_fails_fails_where_it_is_waited_for(threads: ChannelThreads) -> None:
    def refuse() -> Posted:
        raise RuntimeError("no route")

    not_posted, fine = threads.post("a channel", refuse), threads.post("a channel", Posted)
    failed = threads.follow("another", Posted(error=RuntimeError("Connection closed")))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no route"):
            not_posted.wait()
    with pytest.raises(RuntimeError, match="Connection closed"):
        failed.wait()
    assert not not_posted.is_completed()
    assert not failed.is_completed()
    assert fine.wait(PATIENCE)


def test_a_wait_times_out_although_an_earlier_transfer_is_pending(threads: ChannelThreads) -> None:
    go = threading.Event()
    threads.follow("a channel", Posted(go))
    behind = threads.post("a channel", Posted)
    with pytest.raises(RuntimeError, match=r"^Timed out waiting 0\.01 s"):
        behind.wait(timedelta(seconds=0.01))
    go.set()
    assert behind.wait(PATIENCE)


def test_a_wait_is_not_over_before_its_transfer_whatever_else_ends(threads: ChannelThreads) -> None:
    """A thread that ends something else meanwhile, or ended what was waited for before, wakes nobody early."""
    for _ in range(200):
        go = threading.Event()
        late = threads.follow("one", Posted(go))
        others = [threads.follow("another", Posted()) for _ in range(3)]
        assert all(work.wait(PATIENCE) for work in others)
        assert not late.is_completed()
        go.set()
        assert late.wait(PATIENCE)


def test_an_interruption_ends_the_wait_and_every_later_one(threads: ChannelThreads) -> None:
    go = threading.Event()
    done, stuck = threads.follow("one", Posted()), threads.follow("another", Posted(go))
    until(done.is_completed)
    threading.Timer(0.05, lambda: threads.interrupt("a rank has failed")).start()
    with pytest.raises(InterruptedTransferError, match="a rank has failed"):
        stuck.wait(PATIENCE)
    with pytest.raises(InterruptedTransferError, match="a rank has failed"):
        threads.post("a third", Posted).wait(PATIENCE)
    assert done.wait()  # what is done is done
    go.set()


def test_after_an_interruption_no_thread_begins(threads: ChannelThreads) -> None:
    """It would wait for ever for what its channel is given."""
    threads.interrupt("a rank has failed")
    with pytest.raises(InterruptedTransferError, match="a rank has failed"):
        threads.follow("a channel", Posted()).wait(PATIENCE)
    assert not threads._threads


def test_a_finished_transfer_keeps_no_tensor(threads: ChannelThreads) -> None:
    """The work holds the tensor: where the thread kept it, memory would come back one transfer late."""
    posted = Posted()
    gone = weakref.ref(posted)
    work = threads.follow("a channel", posted)
    del posted
    assert work.wait(PATIENCE)
    gc.collect()
    assert gone() is None


def test_closing_logs_transfers_that_cannot_be_ended(
    threads: ChannelThreads, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo_threads, "_PATIENCE", 0.05)
    go = threading.Event()
    threads.follow(("sends", "G", "to", 1), Posted(go))
    assert threads.follow(("sends", "A", "to", 2), Posted()).wait(PATIENCE)
    threads.close()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "cannot end 1 transfer(s)" in said
    assert said.endswith(": sends G to 1")
    go.set()

"""The thread that posts large sends: in order, errors and time limits to the one who waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import pytest

from megatron_pp.send_thread import PostedLater, SendThread


class Sent:
    """A work that was posted."""

    def __init__(self) -> None:
        self.waited_for: list[timedelta | None] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waited_for.append(timeout)
        return True

    def is_completed(self) -> bool:
        return bool(self.waited_for)


@pytest.fixture
def sender() -> Iterator[SendThread]:
    made = SendThread("a sender")
    yield made
    made.close()


def test_sends_are_posted_in_order_and_not_by_the_caller(sender: SendThread) -> None:
    posted: list[tuple[int, str]] = []

    def post(number: int) -> Sent:
        posted.append((number, threading.current_thread().name))
        return Sent()

    works = [sender.post(partial(post, number)) for number in range(20)]
    assert all(work.wait() for work in works)
    assert posted == [(number, "a sender") for number in range(20)]
    assert all(work.is_completed() for work in works)


def test_a_send_that_can_not_be_posted_fails_where_it_is_waited_for(sender: SendThread) -> None:
    def refuse() -> Sent:
        raise RuntimeError("no route")

    failed, fine = sender.post(refuse), sender.post(Sent)
    with pytest.raises(RuntimeError, match="no route"):
        failed.wait()
    assert not failed.is_completed()
    assert fine.wait(timedelta(seconds=5))


def test_a_wait_is_over_in_time_though_an_earlier_send_is_not_posted(sender: SendThread) -> None:
    go = threading.Event()

    def slow() -> Sent:
        go.wait(30)
        return Sent()

    sender.post(slow)
    behind = sender.post(Sent)
    with pytest.raises(RuntimeError, match=r"^Timed out after 0\.01 s"):
        behind.wait(timedelta(seconds=0.01))
    go.set()
    assert behind.wait()


def test_the_rest_of_the_time_is_for_the_transfer() -> None:
    sent = Sent()
    later = PostedLater(lambda: sent)
    later.run()
    later.wait(timedelta(seconds=9))
    assert sent.waited_for[0] is not None
    assert timedelta(seconds=8) < sent.waited_for[0] <= timedelta(seconds=9)

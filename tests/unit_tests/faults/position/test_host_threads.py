"""Which threads may run a step, and where they are."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from megatron_pp.faults.position import host_threads
from testkit.autograd_thread import autograd_thread

pytestmark = pytest.mark.callers_thread  # each test has its own


class Pause:
    """A hook of a backward that stays in ``here`` until it may go on."""

    def __init__(self) -> None:
        self.is_here, self.may_go_on = threading.Event(), threading.Event()

    def backward_stays_here(self, gradient: torch.Tensor) -> None:
        self.is_here.set()
        self.may_go_on.wait(10)


def test_a_backward_of_autograds_thread_is_seen_and_moves() -> None:
    first, second = Pause(), Pause()

    def train() -> None:
        x = torch.ones(3, requires_grad=True) * 2
        x.register_hook(first.backward_stays_here)
        (x * 2).sum().backward()
        second.backward_stays_here(x)

    caller = threading.Thread(target=train)
    with autograd_thread():
        caller.start()
        assert caller.ident is not None
        assert first.is_here.wait(10)
        before = host_threads.places(caller.ident)
        text = host_threads.stacks(caller.ident)
        first.may_go_on.set()
        assert second.is_here.wait(10)
        after = host_threads.places(caller.ident)
        second.may_go_on.set()
        caller.join(10)
    assert "In another thread, as of autograd:" in text
    assert "backward_stays_here" in text.partition("In another thread")[2]
    assert "job.wait()" in text.partition("In another thread")[0], "the caller comes first"
    assert before != after


def test_threads_of_the_program_do_not_count() -> None:
    pause = Pause()
    thread = threading.Thread(target=pause.backward_stays_here, args=(torch.ones(1),))
    before = host_threads.stacks(threading.get_ident())
    thread.start()
    assert pause.is_here.wait(10)
    during = host_threads.stacks(threading.get_ident())
    pause.may_go_on.set()
    thread.join(10)
    assert "backward_stays_here" not in before + during


def test_a_thread_that_has_ended_is_nowhere() -> None:
    thread = threading.Thread(target=list)
    thread.start()
    thread.join(10)
    assert thread.ident is not None
    assert "in list" not in host_threads.stacks(thread.ident)


def test_no_frame_is_kept_with_pythons_collector_off() -> None:
    class Held: ...

    def hold(held: Held) -> None:
        pause.backward_stays_here(torch.ones(1))

    pause, held = Pause(), Held()
    alive = weakref.ref(held)
    thread = threading.Thread(target=hold, args=(held,))
    del held
    gc.disable()
    try:
        thread.start()
        assert pause.is_here.wait(10)
        assert thread.ident is not None
        assert "hold" in host_threads.stacks(thread.ident)
        assert host_threads.places(thread.ident)
        pause.may_go_on.set()
        thread.join(10)
        del thread
        assert alive() is None
    finally:
        gc.enable()

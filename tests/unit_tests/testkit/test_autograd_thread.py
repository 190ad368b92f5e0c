"""Backwards in a thread of autograd: what is there of the caller's, and what is not; and which tests have them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.threads import run_ranks
from megatron_pp.testing.toy import ToyData, reference_run
from megatron_pp.weight_grad import split_weight_grad
from megatron_pp.weight_grad.store import WeightGradStore
from testkit import autograd_draw
from testkit.autograd_thread import autograd_thread
from testkit.device_runs.stream_runs import toy_step_on_streams

pytestmark = pytest.mark.callers_thread  # which thread is each test's own matter
LOCAL, CONTEXT = threading.local(), ContextVar("context", default="")


@pytest.fixture
def in_thread() -> Iterator[None]:
    with autograd_thread():
        yield


def in_backward(what: Any, reentrant: bool | None = None) -> Any:
    """What ``what()`` gives within a backward; ``reentrant``: in the recomputation of a checkpoint."""
    found: list[Any] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        if torch._C._current_graph_task_id() != -1:
            found.append(what())
        return x * x

    x = torch.ones(3, requires_grad=True)
    if reentrant is None:
        y = x * 2
        y.register_hook(lambda grad: found.append(what()))
    else:
        y = checkpoint(forward, x, use_reentrant=reentrant)
    y.sum().backward()
    return found[0]


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_pythons_thread_locals_are_missing_in_autograds_thread(reentrant: bool | None, in_thread: None) -> None:
    LOCAL.value = "caller's"
    token = CONTEXT.set("caller's")

    def ask() -> Any:
        return getattr(LOCAL, "value", ""), CONTEXT.get(), threading.get_ident() == caller

    caller = threading.get_ident()
    assert in_backward(ask, reentrant) == ("", "", False)
    assert ask() == ("caller's", "caller's", True)
    CONTEXT.reset(token)


def test_a_thread_of_autograd_remembers_its_own(in_thread: None) -> None:
    def count() -> int:
        LOCAL.count = getattr(LOCAL, "count", 0) + 1
        return LOCAL.count

    assert [in_backward(count) for _ in range(3)] == [1, 2, 3]
    assert not hasattr(LOCAL, "count")


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.threads.add(threading.get_ident())
        return func(*args, **(kwargs or {}))


def state() -> tuple[Any, ...]:
    """What torch keeps for each thread, and gives to its own."""
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return *autocast, hooks is None, torch._C._is_key_in_tls("context")


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_torchs_thread_state_is_present_in_autograds_thread(reentrant: bool | None) -> None:
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)

    def found(where: Any) -> Any:
        with where(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False), hooks:
            return in_backward(state, reentrant), state()[:4]

    assert found(autograd_thread) == found(nullcontext)
    with autograd_thread():  # and not what an earlier backward had
        assert in_backward(state) == (False, torch.bfloat16, True, True, True)


def test_modes_see_the_operations_of_a_backward(in_thread: None) -> None:
    operations, functions = Operations(), Functions()
    x = torch.ones(3, requires_grad=True)
    with functions, operations:
        torch.autograd.graph._engine_run_backward(
            ((x * 2).sum(),), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    assert len(operations.threads) == 2
    x.grad = None
    seen = len(operations.threads)
    (x * 2).sum().backward()
    assert len(operations.threads) == seen


def test_gradients_are_off_unless_a_graph_is_wanted(in_thread: None) -> None:
    assert in_backward(torch.is_grad_enabled) is False
    x = torch.ones(3, requires_grad=True)
    (grad,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    assert torch.autograd.grad(grad.sum(), x)[0].tolist() == [6.0] * 3


def test_an_error_is_the_callers(in_thread: None) -> None:
    def fail() -> None:
        raise ValueError("in a hook")

    with pytest.raises(ValueError, match="in a hook"):
        in_backward(fail)
    assert in_backward(lambda: "still there") == "still there"


def test_without_torchs_threads_it_stays_where_it_is(in_thread: None) -> None:
    with torch.autograd.set_multithreading_enabled(False):
        assert in_backward(threading.get_ident) == threading.get_ident()


def test_ranks_as_threads_have_a_thread_each_for_as_long_as_they_last(in_thread: None) -> None:
    known, all_there = set(sys._current_frames()), threading.Barrier(3)

    def ident() -> int:
        all_there.wait(10)  # an ident is given again when its thread has ended
        return threading.get_ident()

    found = run_ranks(3, lambda rank: in_backward(ident))
    assert len(set(found)) == 3
    assert not known & set(found)
    end = time.monotonic() + 10
    while set(found) & set(sys._current_frames()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not set(found) & set(sys._current_frames())


def test_threading_knows_it_as_little_as_torchs_own(in_thread: None) -> None:
    thread = in_backward(threading.get_ident)
    assert thread not in {known.ident for known in threading.enumerate()}


def test_nothing_of_a_backward_is_kept(in_thread: None) -> None:
    y = torch.ones(3, requires_grad=True) * 2
    y.register_hook(lambda grad: 1 / 0)
    total = y.sum()
    with pytest.raises(ZeroDivisionError):
        total.backward()
    alive = weakref.ref(y)
    del y, total
    gc.collect()
    assert alive() is None


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_a_thread_of_its_own() -> None:
    code = """
import os, torch
from testkit.autograd_thread import autograd_thread
with autograd_thread():
    x = torch.ones(3, requires_grad=True)
    x.sum().backward()
    child = os.fork()
    x.sum().backward()
    if child == 0:
        os._exit(int(x.grad.sum()))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["6"], done.stderr


def test_a_rank_of_a_virtual_device_keeps_its_device(in_thread: None) -> None:
    report, difference = toy_step_on_streams("1f1b", 2, ToyData(4))
    assert not report.races, str(report)
    assert difference == 0.0


# -- a fault that only this shows --------------------------------------------------------------------------------------


class _OfCaller:
    """``WeightGradStore._current`` in a thread-local."""

    def __init__(self) -> None:
        self.here = threading.local()

    def __get__(self, store: Any, kind: Any = None) -> Any:
        return getattr(self.here, "current", None)

    def __set__(self, store: Any, current: Any) -> None:
        self.here.current = current


@pytest.mark.parametrize("where", [nullcontext, autograd_thread])
@pytest.mark.parametrize("on_devices", [False, True])
def test_a_store_that_knows_its_backward_by_the_callers_thread(
    on_devices: bool, where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WeightGradStore, "_current", _OfCaller(), raising=False)
    data = ToyData(4)

    def difference() -> float:
        if on_devices:
            report, found = toy_step_on_streams("zb_h1", 2, data, prepare=split_weight_grad)
            return float("nan") if report.races else found
        result = run_in_threads(2, 1, data, pipeline_schedule="zb_h1", prepare=split_weight_grad)
        return result.difference(reference_run(2, data))

    with where():
        if where is nullcontext:
            assert difference() == 0.0
        else:
            with pytest.raises(Exception, match="a converted layer's backward ran outside of"):
                difference()


# -- which tests have them ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("said", "at_least", "at_most"), [("all", 600, 600), ("none", 0, 0), ("7", 170, 230)])
def test_a_third_is_drawn(said: str, at_least: int, at_most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(autograd_draw.NAME, said)
    tests = [f"tests/test_{n}.py::test" for n in range(600)]
    drawn = [autograd_draw.is_drawn(test) for test in tests]
    assert at_least <= sum(drawn) <= at_most
    assert drawn == [autograd_draw.is_drawn(test) for test in tests]


def test_another_seed_draws_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn_by(seed: int) -> set[int]:
        monkeypatch.setenv(autograd_draw.NAME, str(seed))
        return {n for n in range(600) if autograd_draw.is_drawn(f"test_{n}")}

    assert len(drawn_by(1) & drawn_by(2)) < 100


@pytest.mark.parametrize("in_thread", [True, False])
def test_processes_that_a_drawn_test_starts_do_the_same(in_thread: bool) -> None:
    code = """
import threading, torch
x = torch.ones(3, requires_grad=True)
x.register_hook(lambda grad: print(threading.current_thread() is threading.main_thread()))
x.sum().backward()
"""
    with autograd_draw.backwards(in_thread):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(not in_thread), done.stderr

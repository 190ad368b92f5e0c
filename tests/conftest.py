"""What every test, and every process a test starts, runs under."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.forkserver
import os
import socket
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

PROJECT_ROOT = Path(__file__).resolve().parent.parent


def _name_of_loopback() -> str | None:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def _set_environment() -> None:
    """Before torch is imported: one thread per process, since tests run many; gloo on the loopback interface.

    PYTHONPATH lets the processes that tests start (torchrun, python -m) find the package and `tests` from any
    directory, installed or not.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # nothing is compiled: Megatron-core is imported in half the time
    loopback = _name_of_loopback()
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(PROJECT_ROOT) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(PROJECT_ROOT), *filter(None, paths)])
    if str(PROJECT_ROOT) not in sys.path:
        sys.path.insert(0, str(PROJECT_ROOT))
    # Hundreds of interpreters start: without bytecode each compiles the package again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


_set_environment()

from testkit import autograd_draw, process_state  # noqa: E402  # of the path that was just set
from testkit.rank_processes import PRELOADED  # noqa: E402

# No test depends on time, or on chance.
hypothesis.settings.register_profile("project", deadline=None, derandomize=True)
hypothesis.settings.load_profile("project")


# Ranks that a test starts with start_method="forkserver" are forked from a process that has loaded this. Tests of
# numbers, and of groups that all ranks make in one order, fork one rank from a second such process: with an order of
# sets of its own.
multiprocessing.set_forkserver_preload(PRELOADED)


@pytest.fixture(autouse=True)
def process_is_left_as_it_was() -> Iterator[None]:
    """It would change the result of other tests, in some of the orders that workers take. Torn down after all other
    fixtures of the test, such as `monkeypatch`."""
    before = process_state.values()
    yield
    changes = process_state.changes(before, process_state.values())
    assert not changes, "this test left its process changed: " + "; ".join(changes)


@pytest.fixture(scope="session")
def fork_server() -> None:
    """For programs that would start it with modules of their own: the one of all tests serves them too."""
    multiprocessing.forkserver.ensure_running()


# Workers take files in this order, then all others: what runs long in one piece must not be left for the end. Files
# that wait for most of their time, such as those of deadlines (unit tests of faults, for example), stand beside files
# that compute: where all workers have such a file at the same time, the cores idle.
LONG = (
    *("test_faults.py", "test_differential.py", "test_multinode.py", "test_device_lines.py"),
    *("test_megatron_failures.py", "test_train_script.py", "test_torch_agreement_failures.py", "test_printed.py"),
    *("test_threads_that_ask.py", "test_megatron_training.py", "test_gloo_numbers.py", "test_train_schedules.py"),
    *("test_replicas_after_an_abort.py", "test_parity_scripts.py", "test_guard.py", "test_plan_search.py"),
    *("test_mutual_waits.py", "test_pipeline_search.py", "test_benchmark_all.py", "test_between_steps.py"),
    *("test_schedules_split.py", "test_torch_pipelining.py", "test_lost_store.py"),
    *("test_torch_pipelining_sharded.py", "test_hosts_that_run_ahead.py"),
)


def place_of(item: pytest.Item) -> tuple[int, bool]:
    """What comes first has less."""
    name = item.path.name
    return LONG.index(name) if name in LONG else len(LONG), "functional_tests" not in item.path.parts


def pytest_report_header() -> str:
    return f"{autograd_draw.NAME}={autograd_draw.said()}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """A drawn test, with its fixtures, runs its backwards in a thread of autograd, and says so where it fails."""
    drawn = autograd_draw.is_drawn(item.nodeid) and item.get_closest_marker("callers_thread") is None
    if drawn:
        item.add_report_section("setup", "autograd", f"in a thread: {autograd_draw.NAME}=all repeats it")
    with autograd_draw.backwards(drawn):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Nothing is collected while libraries are imported, and later collections need not look through what they hold.
    They are rare: a worker's plans and models are millions of objects.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 20, 50)
        gc.enable()


def pytest_sessionfinish() -> None:
    """pytest collects five times at the end."""
    gc.freeze()


def searches(item: pytest.Item) -> bool:
    """Whether the test is parametrised with a schedule whose order is searched for, which takes most of a second."""
    call = getattr(item, "callspec", None)
    return call is not None and any(isinstance(v, str) and v in ("auto", "auto_v") for v in call.params.values())


@pytest.hookimpl(tryfirst=True)  # before the tests that -m names are chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=place_of)
    for item in filter(searches, items):
        item.add_marker(pytest.mark.slow)
    needing_gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not needing_gpu:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in needing_gpu:
        item.add_marker(pytest.mark.skip(reason="no CUDA device here"))

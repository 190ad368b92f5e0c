"""This process: its place in the run, how the processes meet and agree, and how it ends."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from examples.gpt.errors import ArgumentError, TrainingError
from megatron_pp import parallel_state
from megatron_pp.errors import ConfigError, PlanError, ScheduleInputError
from megatron_pp.faults.nccl_settings import leave_failures_to_the_guard
from megatron_pp.runtime.communicators import close_communicators
from megatron_pp.tools.draw.facts import counted

_PATIENCE = timedelta(minutes=10)  # longest time between the first process and the last one at the start
_ROOT = "megatron_pp/meeting"  # prefix of our keys in torchrun's store
_STACK = 4  # shown frames of a stack


class Process(NamedTuple):
    """The values of torchrun's environment variables for a process. The defaults are those of a single process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> Process:
        return cls(*(int(os.environ.get(name.upper(), str(default))) for name, default in cls._field_defaults.items()))


def choose_device(wanted: str, process: Process) -> torch.device:
    """The GPU of this process, or the CPU. ``auto`` chooses GPUs if this machine has one for each of its processes.
    Raises ArgumentError for ``cuda`` without enough GPUs."""
    gpus, needed = torch.cuda.device_count() if wanted != "cpu" else 0, process.local_world_size
    if wanted == "cuda" and gpus < needed:
        there = f"--device is cuda, but of {counted(needed, 'rank')} here each needs a GPU, and there are {gpus}"
        raise ArgumentError(f"{there}: start fewer, or give --device cpu")
    return torch.device("cuda", process.local_rank) if gpus >= needed else torch.device("cpu")


@contextmanager
def joined(process: Process, device: torch.device, timeout: timedelta) -> Iterator[None]:
    """A context in which the default process group exists: NCCL on GPUs, gloo on the CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        leave_failures_to_the_guard()
    rank, size = process.rank, process.world_size
    store: Any = dist.HashStore()
    if size > 1:
        store, _, _ = next(iter(dist.rendezvous("env://", rank, size, timeout=_PATIENCE)))
        if "TORCHELASTIC_RUN_ID" in os.environ:
            store = dist.PrefixStore(f"{_ROOT}/{agreed_place(store, rank, size)}", store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    yield
    # Not after an error: closing a group may block if peers are in the middle of a step.
    close_communicators()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def agreed_place(store: Any, rank: int, world_size: int) -> str:
    """A name that all processes of this start get from ``store``, and no process of an earlier start.

    torchrun's store outlives a restart. It still has the addresses of the earlier processes, and new ones would hang on
    them. Its restart count differs between nodes. So rank 0 makes up a name. Each other rank draws a number, and waits
    for rank 0's answer to it. Rank 0 also answers to numbers of earlier starts, but no process reads these answers."""
    if rank > 0:
        number = store.add(f"{_ROOT}/numbers", 1)
        place = store.get(f"{_ROOT}/answer/{number}").decode()
        store.add(f"{_ROOT}/{place}/heard", 1)
        return str(place)
    place, answered, until = uuid.uuid4().hex, 0, time.monotonic() + _PATIENCE.total_seconds()
    while (heard := store.add(f"{_ROOT}/{place}/heard", 0)) < world_size - 1:
        for number in range(answered + 1, (drawn := store.add(f"{_ROOT}/numbers", 0)) + 1):
            store.set(f"{_ROOT}/answer/{number}", place)
        answered = drawn
        if time.monotonic() > until:
            raise RuntimeError(f"only {heard + 1} of {world_size} processes have come to the store within {_PATIENCE}")
        time.sleep(0.02)
    return place


def on_all_ranks(action: Callable[[], Any]) -> list[Any]:
    """Run ``action`` on every rank. Returns the results of all ranks. Collective. If it raises a TrainingError or
    OSError on some ranks, every rank raises that of the lowest one."""
    try:
        result = action()
    except (TrainingError, OSError) as error:
        result = error
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def on_first_rank(action: Callable[[], Any]) -> Any:
    """Run ``action`` on rank 0. Returns its result on every rank. Collective. Errors are raised as by
    ``on_all_ranks``."""
    return on_all_ranks(lambda: action() if dist.get_rank() == 0 else None)[0]


def check_same_settings(settings: Mapping[str, Any]) -> None:
    """Raises ArgumentError on every rank if processes were started with different settings. Collective."""
    first, *others = on_all_ranks(lambda: dict(settings))
    for rank, other in enumerate(others, start=1):
        for name in (name for name in first if other[name] != first[name]):
            different = f"--{name.replace('_', '-')} is {first[name]} on rank 0 and {other[name]} on rank {rank}"
            raise ArgumentError(f"{different}; start all nodes with the same flags")


class StopRequest:
    """Catches SIGINT and SIGTERM from its construction on. ``first`` is the first signal.

    If a process ended by itself, its peers would wait for it in the middle of a step. So the ranks exchange their
    requests at the end of each step, and all end after the same step."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self.first = self.first or signal.Signals(number)


def report(error: Exception, foreseen: bool) -> int:
    """Print the error that has ended this rank: its message if it was ``foreseen``, otherwise its stack. Returns the
    exit code.

    On each node only the first rank that fails prints a message, and only the first with an unforeseen error prints its
    stack. All ranks write the error into torchrun's error file, from which scripts/launch.py makes its last line."""
    with suppress(OSError):
        get_error_handler().record_exception(error)
    if _is_first("message" if foreseen else "stack"):
        stack = "".join(traceback.format_exception(error, limit=-_STACK)).rstrip()
        print(f"train.py: {type(error).__name__}: {error}" if foreseen else stack, file=sys.stderr, flush=True)
    default = 2 if isinstance(error, (ConfigError, PlanError, ScheduleInputError)) else 1
    return getattr(error, "exit_code", default)


def _is_first(kind: str) -> bool:
    """Whether this is the first call with ``kind`` on this node since torchrun has started the ranks."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        try:
            (Path(file).parents[1] / kind).touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            pass  # the disk is full, or the folder is gone: printing twice is better than not printing
    return True


def end_process(code: int) -> NoReturn:
    """End this process with ``code``. After a failure the destructors of process groups do not run: they may wait for
    peers."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code != 0:
        os._exit(code)
    sys.exit(code)

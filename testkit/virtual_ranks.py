"""Ranks as threads on virtual devices, in place of processes on GPUs: ``run_processes`` without a GPU."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from weakref import WeakMethod

import torch.distributed as dist

from megatron_pp.common.finalizers import call_if_alive
from megatron_pp.faults import heartbeat, watchdog
from megatron_pp.feature_table import FEATURES
from megatron_pp.on_demand import load
from megatron_pp.testing.threads import run_ranks
from testkit.streams import DeviceRules, StreamNetwork, virtual_cuda
from testkit.streams.check import StreamReport
from testkit.streams.device import VirtualDevice, current_device
from testkit.streams.network import NO_MORE_RULES
from testkit.streams.torch_calls.cuda import replaced
from testkit.virtual_groups import process_group, virtual_distributed


class _OfRank(MutableMapping[Any, Any]):
    """A table of the process, separate for each rank, and shared by all threads of the rank."""

    def __init__(self) -> None:
        self._tables: defaultdict[VirtualDevice | None, dict[Any, Any]] = defaultdict(dict)

    def __getitem__(self, key: Any) -> Any:
        return self._tables[current_device()][key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._tables[current_device()][key] = value

    def __delitem__(self, key: Any) -> None:
        del self._tables[current_device()][key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._tables[current_device()])

    def __len__(self) -> int:
        return len(self._tables[current_device()])


def run_on_virtual_devices(
    rank_main: Callable[..., Any],
    size: int,
    args: Sequence[Any] = (),
    *,
    timeout: float = 60.0,
    backend: str | None = None,
    environment: dict[str, str] | None = None,
    start_method: str = "",
) -> list[Any]:
    """``run_processes`` within ``virtual_machine``. ``rank_main(rank, size, *args)`` makes the process group."""
    assert backend is None
    rules = DeviceRules(one_device=True)
    network = StreamNetwork(
        size, seed=None, record_streams=True, rules=rules, looks_for_races=False
    )  # no caller reads races

    def run(rank: int) -> Any:
        with network.running(rank):
            return rank_main(rank, size, *args)

    at_exit: list[WeakMethod[Callable[[], object]]] = []

    def call_at_exit(method: Callable[[], object]) -> None:
        at_exit.append(WeakMethod(method))

    places = [(module, "call_at_exit", call_at_exit) for module in (heartbeat, watchdog)]
    with patch.dict(os.environ, environment or {}), replaced(places):
        try:
            return run_ranks(size, run, network.abort, timeout)
        finally:  # as at the end of the ranks' programs
            for method in reversed(at_exit):
                call_if_alive(method)


def check_ranks(
    rank_main: Callable[..., Any],
    size: int,
    args: Sequence[Any] = (),
    *,
    record_streams: bool = False,
    rules: DeviceRules = NO_MORE_RULES,
    timeout: float = 60.0,
) -> StreamReport:
    """``check_streams`` for any code that calls ``torch.distributed``. ``rank_main(rank, size, *args)`` runs in a
    thread per rank, each the host of a virtual CUDA device, within a process group of backend "nccl"."""
    network = StreamNetwork(size, seed=None, record_streams=record_streams, rules=rules)
    store = dist.HashStore()

    def run(rank: int) -> Any:
        with network.running(rank), process_group(network, rank, store):
            return rank_main(rank, size, *args)

    with virtual_machine():
        results = run_ranks(size, run, network.abort, timeout)
    return StreamReport.of(network, results)


@contextmanager
def virtual_machine(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """A context in which ``torch.cuda`` and ``torch.distributed`` are virtual. ``places``: further replacements,
    (place, name, new)."""
    # A copy of the package may lack it.
    sliced = [load(row.step) for row in FEATURES if row.folder == "slices"]
    of_processes = [(module, "_RUNNING", _OfRank()) for module in sliced]
    with virtual_cuda(), virtual_distributed(), patch.dict(os.environ), replaced([*of_processes, *places]):
        yield

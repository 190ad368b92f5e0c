"""Run a pipeline step on virtual devices and report the stream races in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_pp.testing.streams.cuda import virtual_cuda
from megatron_pp.testing.streams.memory import StreamRace
from megatron_pp.testing.streams.network import StreamNetwork
from megatron_pp.testing.threads import run_ranks


@dataclass(frozen=True)
class StreamReport:
    """What the ranks did.

    races       in the order in which each rank met them; those that differ in numbers only count once
    operations  that the hosts issued to streams, on all ranks
    reused      allocations that got memory of an earlier tensor
    results     what ``rank_main`` returned, by rank
    """

    races: list[StreamRace]
    operations: int
    reused: int
    results: list[Any]

    def __str__(self) -> str:
        found = f"{len(self.races)} race{'' if len(self.races) == 1 else 's'}"
        head = f"{found} in {self.operations} operations; {self.reused} allocations reused memory"
        return "\n".join([head, *map(str, self.races)])


def run_on_streams(network: StreamNetwork, rank_main: Callable[[int], Any], timeout: float = 60.0) -> StreamReport:
    """Run ``rank_main(rank)`` in a thread per rank, each the host of its virtual device, and report the races.

    Raises the first exception of any rank; RuntimeError where devices wait for each other forever.
    """

    def run(rank: int) -> Any:
        with network.running(rank):
            return rank_main(rank)

    with virtual_cuda():
        results = run_ranks(network.size, run, network.abort, timeout)
    devices = network.devices
    return StreamReport(
        [race for device in devices for race in device.races.values()],
        sum(device.operations for device in devices),
        sum(device.allocator.reused for device in devices),
        results,
    )

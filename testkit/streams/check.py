"""Run a pipeline step on virtual devices and report the stream races in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_pp.comm.p2p_communicator import P2PCommunicator
from megatron_pp.config.settings import StepSettings
from megatron_pp.testing.threads import ThreadGroup, run_ranks
from testkit.streams.call_log import CallLog
from testkit.streams.memory import Overwritten, StreamRace
from testkit.streams.network import NO_MORE_RULES, StreamNetwork
from testkit.streams.rules import DeviceRules
from testkit.streams.torch_calls.cuda import virtual_cuda


@dataclass(frozen=True)
class StreamReport:
    """The result of a checked run.

    races       rank by rank, in the order in which they were found; one for each pair of places
    overwritten memory that graphs of one pool have overwritten for each other
    operations  number of operations that the hosts issued to streams
    reused      number of allocations that got memory of an earlier tensor
    results     results of ``rank_main``, by rank
    """

    races: list[StreamRace]
    operations: int
    reused: int
    results: list[Any]
    overwritten: list[Overwritten]

    @classmethod
    def of(cls, network: StreamNetwork, results: list[Any]) -> StreamReport:
        devices = network.devices
        return cls(
            [race for device in devices for race in device.races.values()],
            sum(device.operations for device in devices),
            sum(device.allocator.reused for device in devices),
            results,
            [found for device in devices for found in device.overwritten.values()],
        )

    def __str__(self) -> str:
        found = f"{len(self.races)} race{'' if len(self.races) == 1 else 's'}"
        head = f"{found} in {self.operations} operations; {self.reused} allocations reused memory"
        return "\n".join([head, *map(str, (*self.races, *self.overwritten))])


def check_streams(
    rank_main: Callable[[P2PCommunicator], Any],
    pipeline_size: int,
    config: Any,
    *,
    seed: int = 0,
    record_streams: bool = False,
    rules: DeviceRules = NO_MORE_RULES,
    log: CallLog | None = None,
    timeout: float = 60.0,
) -> StreamReport:
    """Run ``rank_main(communicator)`` in a thread per rank, each the host of a virtual CUDA device, and look for races.

    ``rank_main`` builds the model chunks of ``communicator.rank`` and calls the schedule function with
    ``p2p_communicator=communicator``. ``config`` has Megatron's field names; the communicators are made from it.
    ``seed``, ``record_streams``, ``rules``, ``log``: see ``StreamNetwork``. Raises the first exception of any rank, and
    RuntimeError if the devices wait for each other forever, or are not done after ``timeout`` seconds."""
    one_way = StepSettings.from_config(config).one_way
    network = StreamNetwork(pipeline_size, one_way, seed=seed, record_streams=record_streams, rules=rules, log=log)

    def run(rank: int) -> Any:
        with network.running(rank):
            return rank_main(P2PCommunicator(ThreadGroup(rank, pipeline_size), config, network.transport(rank)))

    with virtual_cuda():
        results = run_ranks(pipeline_size, run, network.abort, timeout)
    return StreamReport.of(network, results)

"""Measures how long transfers of several sizes take on a pipeline's links, and copies to host memory. Also exchanges a
few numbers between neighbours. Everything here runs between steps, blocks, and uses prepared channels.

Both ends of a link send a message of each size back and forth; a transfer is half of a round trip. Links are measured
in rounds, in one order on all ranks; a rank is an end at most once in a round. The first trip warms up. Then both ends
go on until they have made _TRIPS, or _SECONDS are over; the rank that keeps time announces each trip.
"""

import statistics
import time
from collections.abc import Iterable, Sequence

import torch

from megatron_pp.comm.channels import in_rounds
from megatron_pp.comm.transport import ACT, GRAD, Edge, Transport, Work
from megatron_pp.errors import P2PTransferError

_TRIPS = 6
_SECONDS = 0.5
_SMALL = 64  # bytes


def send_numbers(
    transport: Transport, peer: int, kind: str, numbers: Sequence[float], dtype: torch.dtype = torch.int64
) -> None:
    message = torch.tensor(numbers, dtype=dtype, device=transport.device)
    _wait(transport, peer, transport.isend(message, peer, kind))


def receive_numbers(
    transport: Transport, peer: int, kind: str, count: int, dtype: torch.dtype = torch.int64
) -> list[float]:
    """The ``count`` numbers that ``send_numbers`` of ``peer`` has sent; integers if ``dtype`` is an integer type."""
    message = torch.empty(count, dtype=dtype, device=transport.device)
    _wait(transport, peer, transport.irecv(message, peer, kind))
    return message.tolist()  # on a GPU this waits for the message


def _wait(transport: Transport, peer: int, work: Work) -> None:
    """Raises P2PTransferError if the transfer fails, as handles do."""
    try:
        work.wait()
    except RuntimeError as error:
        where = f"pipeline rank {transport.rank}, between steps with rank {peer}"
        raise P2PTransferError(f"{where}: the transfer failed: {error}") from error


def gather_numbers(transport: Transport, mine: Sequence[float]) -> list[list[float]]:
    """Returns the numbers of all ranks on every rank, by rank; all ranks must give as many. Numbers travel along the
    chain of neighbours to the first rank, and from there all of them back. Collective over the pipeline."""
    rank = transport.rank
    size = transport.size
    each = len(mine)
    known = [float(number) for number in mine]
    if rank < size - 1:
        known += receive_numbers(transport, rank + 1, GRAD, (size - 1 - rank) * each, torch.float64)
    if rank > 0:
        send_numbers(transport, rank - 1, GRAD, known, torch.float64)
        known = receive_numbers(transport, rank - 1, ACT, size * each, torch.float64)
    if rank < size - 1:
        send_numbers(transport, rank + 1, ACT, known, torch.float64)
    return [known[start : start + each] for start in range(0, size * each, each)]


def sizes_around(message: float) -> tuple[int, ...]:
    """Four sizes in bytes: nearly nothing, a quarter of ``message``, ``message``, and twice that."""
    size = max(1, round(message))
    return tuple(sorted({_SMALL, max(1, size // 4), size, 2 * size}))


def measure_links(transport: Transport, edges: Iterable[Edge], sizes: Sequence[int]) -> dict[Edge, list[float]]:
    """For each of ``edges`` whose source is this rank, the median seconds of a transfer of each of ``sizes`` bytes.
    Collective over the pipeline; the channels of ``edges`` must have been prepared."""
    times: dict[Edge, list[float]] = {}
    for together in in_rounds([(source, target, ACT) for source, target in sorted(set(edges))]):
        for source, target, _ in together:
            if transport.rank == source:
                times[source, target] = _ask(transport, target, sizes)
            elif transport.rank == target:
                _answer(transport, source, sizes)
    return times


def _ask(transport: Transport, peer: int, sizes: Sequence[int]) -> list[float]:
    messages = _messages(transport, sizes)
    trips: list[list[float]] = []
    until = time.perf_counter() + _SECONDS
    while not trips or (len(trips) <= _TRIPS and time.perf_counter() < until):
        send_numbers(transport, peer, ACT, [1])
        receive_numbers(transport, peer, GRAD, 1)  # wait until the peer is ready
        trips.append([_round_trip(transport, peer, message) / 2 for message in messages])
    send_numbers(transport, peer, ACT, [0])
    return [statistics.median(taken) for taken in zip(*(trips[1:] or trips), strict=True)]


def _round_trip(transport: Transport, peer: int, message: torch.Tensor) -> float:
    began = time.perf_counter()
    _wait(transport, peer, transport.isend(message, peer, ACT))
    _wait(transport, peer, transport.irecv(message, peer, GRAD))
    message[-1].item()  # on a GPU this waits for the message
    return time.perf_counter() - began


def _answer(transport: Transport, peer: int, sizes: Sequence[int]) -> None:
    messages = _messages(transport, sizes)
    while receive_numbers(transport, peer, ACT, 1) == [1]:
        send_numbers(transport, peer, GRAD, [1])
        for message in messages:
            _wait(transport, peer, transport.irecv(message, peer, ACT))
            _wait(transport, peer, transport.isend(message, peer, GRAD))


def _messages(transport: Transport, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Messages of these sizes, all in one piece of memory."""
    memory = torch.zeros(max(sizes), dtype=torch.uint8, device=transport.device)
    return [memory[:size] for size in sizes]


_BYTES = 16 * 2**20
_COPIES = 5


def copy_rates(device: torch.device) -> tuple[str, float, float]:
    """A description of the copy, and the bytes per second to the host and back. On a CPU it is a copy in memory. Waits
    for the device."""
    on_device = torch.zeros(_BYTES, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        host = torch.zeros(_BYTES, dtype=torch.uint8, pin_memory=True)
        return "device and pinned host memory", _rate(host, on_device), _rate(on_device, host)
    rate = _rate(torch.zeros_like(on_device), on_device)
    return "two places in the memory of the CPU", rate, rate


def _rate(target: torch.Tensor, source: torch.Tensor) -> float:
    """The median bytes per second of a copy; the first copy warms up."""
    times = []
    for _ in range(1 + _COPIES):
        began = time.perf_counter()
        target.copy_(source)  # blocks until the copy is done
        times.append(time.perf_counter() - began)
    return _BYTES / statistics.median(times[1:])

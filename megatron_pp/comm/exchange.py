"""Messages of a few numbers between neighbours of a pipeline, between steps: blocking, over prepared channels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_pp.comm.transport import ACT, GRAD, Transport


def send_numbers(
    transport: Transport, peer: int, kind: str, numbers: Sequence[float], dtype: torch.dtype = torch.int64
) -> None:
    message = torch.tensor(numbers, dtype=dtype, device=transport.device)
    transport.isend(message, peer, kind).wait()


def receive_numbers(
    transport: Transport, peer: int, kind: str, count: int, dtype: torch.dtype = torch.int64
) -> list[float]:
    """What ``send_numbers`` of ``peer`` has sent, ``count`` numbers; whole ones where ``dtype`` is."""
    message = torch.empty(count, dtype=dtype, device=transport.device)
    transport.irecv(message, peer, kind).wait()
    return message.tolist()  # on a GPU this waits for the message


def gather_numbers(transport: Transport, mine: Sequence[float]) -> list[list[float]]:
    """The numbers of every rank, by rank, on every rank; as many of each. They go up the chain of neighbours to the
    first rank, and all of them down again. Collective over the pipeline."""
    rank, size, each = transport.rank, transport.size, len(mine)
    known = [float(number) for number in mine]
    if rank < size - 1:
        known += receive_numbers(transport, rank + 1, GRAD, (size - 1 - rank) * each, torch.float64)
    if rank > 0:
        send_numbers(transport, rank - 1, GRAD, known, torch.float64)
        known = receive_numbers(transport, rank - 1, ACT, size * each, torch.float64)
    if rank < size - 1:
        send_numbers(transport, rank + 1, ACT, known, torch.float64)
    return [known[start : start + each] for start in range(0, size * each, each)]

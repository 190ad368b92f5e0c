"""Where the processes of a run meet, and whether it is one run that they were started for.

The store shows nothing of those that were there before.

torchrun's agents outlive the processes that they start, and so does the store in the first of them: after a restart it
still holds the addresses of the processes before, and a new process that reads one fails or waits for a peer that is
gone (torch 2.13, gloo, one machine: in three restarts of four). Neither does torchrun number its starts so that
all processes know the number: an agent that starts its processes again because another one did does not count it. So
the processes find their own place in the store.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from os import environ
from typing import Any

import torch.distributed as dist

from examples.gpt.errors import ArgumentError, TrainingError

_PATIENCE = timedelta(minutes=10)  # between the first process that comes and the last
_POLL = 0.02  # seconds
_ROOT = "megatron_pp/meeting"


def meeting_store(rank: int, world_size: int, environment: Mapping[str, str] = environ) -> Any:
    """The store that all ``world_size`` processes make their groups with, from torchrun's environment variables.

    Raises:
        torch.distributed.DistError: the process that holds it cannot be reached.
        RuntimeError: not all have come in ten minutes.
    """
    if world_size == 1:
        return dist.HashStore()  # a lone process needs no meeting place
    store, _, _ = next(iter(dist.rendezvous("env://", rank, world_size, timeout=_PATIENCE)))
    if "TORCHELASTIC_RUN_ID" not in environment:
        return store
    return dist.PrefixStore(f"{_ROOT}/{agreed_place(store, rank, world_size)}", store)


def agreed_place(store: Any, rank: int, world_size: int) -> str:
    """A name that all processes of this start, and none of an earlier one, get from ``store``.

    Rank 0 makes it up. The others each draw a number and wait until rank 0 has answered to it. It answers to numbers of
    earlier starts as well, but there is nobody to hear.
    """
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
            raise RuntimeError(
                f"only {heard + 1} of {world_size} processes have come to the store within "
                f"{_PATIENCE.total_seconds():.0f} s; see what the launchers of the others say"
            )
        time.sleep(_POLL)
    return place


def on_all_ranks(action: Callable[[], Any]) -> tuple[list[Any], list[Exception]]:
    """Run ``action`` on every rank. Collective.

    Returns:
        What it gave on each rank, and the failures (TrainingError, OSError), in the order of ranks; the same on all.
    """
    result, failure = None, None
    try:
        result = action()
    except (TrainingError, OSError) as error:
        failure = error
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (result, failure))
    return [result for result, _ in outcomes], [failure for _, failure in outcomes if failure is not None]


def check_same_flags(flags: Mapping[str, Any]) -> None:
    """Refuse processes that were started with different flags, as on two machines by hand. Collective.

    Args:
        flags: name -> value of all that this process's command line says.

    Raises:
        ArgumentError: on every rank, naming the first flag that differs and both values.
    """
    everyone, _ = on_all_ranks(lambda: dict(flags))
    for rank, others in enumerate(everyone):
        for name in sorted(everyone[0].keys() | others.keys()):
            first, other = everyone[0].get(name), others.get(name)
            if first != other:
                raise ArgumentError(
                    f"--{name.replace('_', '-')} is {first} on rank 0 and {other} on rank {rank}; start all nodes with "
                    "the same flags"
                )

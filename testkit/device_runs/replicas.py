"""Data-parallel replicas of a pipeline on virtual devices whose hosts run ahead. A rank fails in a given phase of its
step, and each update of every rank is traced back to the transfers from which it was made.

``TracedNetwork`` knows the receives that an abort has *cut*: the abort ended them before their data arrived. Data that
is computed, sent or reduced from such a receive is *tainted*, on any rank. No update may be tainted.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp.errors import PipelineError
from megatron_pp.faults.attach import close_guard, watched
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.testing.memory_transport import End
from megatron_pp.testing.pipeline import placement_of, toy_step
from megatron_pp.testing.threads import run_ranks
from megatron_pp.testing.toy import ToyBlock, ToyData, toy_chunks, toy_config
from testkit.streams import StreamNetwork
from testkit.streams.device import current_device
from testkit.streams.network import StreamWork
from testkit.streams.timelines import Clock
from testkit.virtual_groups import process_group

REPLICAS = 2
FORWARD, BACKWARD = "forward", "backward"
WARMUP, STEADY, COOLDOWN = "in the warm-up", "in the steady state", "in the cool-down"
PAST_THE_PLAN, REDUCTION = "past the last instruction", "amid the reduction"
BEFORE_THE_OPTIMIZER, GATHER = "before the optimizer", "before parameters are gathered"
PHASES = (WARMUP, STEADY, COOLDOWN, PAST_THE_PLAN, REDUCTION, BEFORE_THE_OPTIMIZER, GATHER)


class InjectedError(Exception):
    """The error of the failing rank."""


class TracedNetwork(StreamNetwork):
    """Records for each transfer its clock on its rank, and the source of its data. ``updates``: (rank, step, clock) of
    each update."""

    def __init__(self, size: int) -> None:
        super().__init__(size, seed=None, looks_for_races=False)
        self.updates: list[tuple[int, int, Clock]] = []
        self._past: dict[StreamWork, Clock] = {}
        self._ends: dict[StreamWork, set[bool]] = {}
        self._sources: defaultdict[StreamWork, list[StreamWork]] = defaultdict(list)
        self._cut: set[StreamWork] = set()

    def enqueue(self, work: Any) -> Any:
        self._past[work] = dict(work.end)
        self._ends[work] = {end.is_send for end in work.ends}
        return super().enqueue(work)

    def meet(self, send: End, receive: End) -> None:
        source: Any = send.work
        target: Any = receive.work
        self._sources[target].append(source)
        super().meet(send, receive)

    def abort_communicator(self, name: str, rank: int) -> None:
        with self.changed:
            unfinished = (work for work in self._unfinished if work.queue == (name, rank))
            self._cut |= {work for work in unfinished if False in self._ends[work]}
            super().abort_communicator(name, rank)

    def tainted_updates(self) -> list[tuple[int, int]]:
        """(rank, step) of each tainted update."""
        tainted = self._tainted()
        return [(rank, step) for rank, step, past in self.updates if self._is_after(tainted, rank, past)]

    def _tainted(self) -> set[StreamWork]:
        found = set(self._cut)
        before = -1
        while len(found) > before:
            before = len(found)
            for work in self._past.keys() - found:
                sends_it = True in self._ends[work] and self._is_after(found, work.rank, self._past[work])
                if sends_it or not found.isdisjoint(self._sources[work]):
                    found.add(work)
        return found

    def _is_after(self, works: set[StreamWork], rank: int, past: Clock) -> bool:
        """Whether ``past`` contains the receive of one of ``works`` on ``rank``."""
        for work in works:
            if work.rank == rank and False in self._ends[work]:
                lane = self._lanes[work.queue].number
                if past.get(lane, 0) >= self._past[work][lane]:
                    return True
        return False


@dataclass
class Fault:
    """``rank`` raises in ``phase`` of step 2, ``late`` seconds after it has reached it, when the hosts of other ranks
    are as far as they can run. ``stuck``: whether its device has finished no transfer of its pipeline in that step;
    then they are cut. ``blind``: seconds in which the other pipelines find no failure in the store."""

    rank: int
    phase: str
    stuck: bool
    blind: float
    late: float = 0.2
    at: float = 0.0
    seen: threading.Event = field(default_factory=threading.Event)

    def strike(self) -> None:
        time.sleep(self.late)
        self.at = time.monotonic()
        after = threading.Timer(self.blind, self.seen.set)
        after.daemon = True
        after.start()
        raise InjectedError(self.phase)


class CountingBlock(ToyBlock):
    """A block that calls ``reached(FORWARD or BACKWARD, n)`` in its nth forward or backward, counted from 0."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.reached: Callable[[str, int], None] = lambda what, n: None
        self.counts = {FORWARD: 0, BACKWARD: 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._count(FORWARD)
        output = super().forward(x)
        output.register_hook(lambda grad: self._count(BACKWARD))
        return output

    def _count(self, what: str) -> None:
        self.counts[what] += 1
        self.reached(what, self.counts[what] - 1)


class Replica:
    """One rank of ``REPLICAS`` pipelines of ``size`` ranks. Its replicas reduce on their own groups.

    ``distributed``: a distributed optimizer. Each chunk's gradients are reduced and scattered beside the pipeline, on
    another stream, as soon as they are complete; each replica updates its shard; parameters are gathered. ``outside``:
    the program reduces after the step, and nothing watches the program after the step."""

    def __init__(
        self, network: TracedNetwork, rank: int, size: int, chunks: int, distributed: bool, outside: bool
    ) -> None:
        everyone = range(REPLICAS * size)
        self.network = network
        self.rank = rank
        self.distributed = distributed
        self.outside = outside
        pipelines = [dist.new_group(list(everyone[at : at + size])) for at in everyone[::size]]
        replicas = [dist.new_group(list(everyone[at::size])) for at in range(size)]
        self.pipeline = pipelines[rank // size]
        self.replicas = replicas[rank % size]
        self.microbatches = 2 * size
        self.number = 0
        self.fault: Fault | None = None
        self.config = toy_config(
            overlap_p2p_comm=True,
            p2p_timeout=600.0,
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            pipeline_schedule="interleaved_1f1b" if chunks > 1 else "1f1b",
            finalize_model_grads_func=None if outside else self._finalize,
            grad_sync_func=self._reduce_beside if distributed else None,
        )
        self.communicator = P2PCommunicator(self.pipeline, self.config)
        self.chunks = toy_chunks(placement_of(self.config, size, chunks), rank % size, self.config, CountingBlock)
        self.parameters = [parameter for chunk in self.chunks for parameter in chunk.parameters()]
        for number, chunk in enumerate(self.chunks):
            chunk.inner.reached = partial(self._reached, number)
        self.side = torch.cuda.Stream()
        self.shards = [torch.nn.Parameter(self._own(parameter)) for parameter in self.parameters]
        self.optimizer = torch.optim.SGD(self.shards if distributed else self.parameters, lr=0.1)
        self.optimizer.register_step_post_hook(self._note_update)

    def step(self) -> None:
        """Run one step on the host. The device may still be busy at its end."""
        self.number += 1
        for chunk in self.chunks:
            chunk.inner.counts = {FORWARD: 0, BACKWARD: 0}
        for parameter in (*self.parameters, *self.shards):
            parameter.grad = None
        self.before = self.values()
        with nullcontext() if self.outside else watched(self.communicator, self.config, "the iteration"):
            toy_step(self.chunks, ToyData(self.microbatches), self.communicator)
            if self.outside:
                self._finalize()
            self._strike(BEFORE_THE_OPTIMIZER)
            assert all(updated.grad is not None for updated in self.optimizer.param_groups[0]["params"])
            self.optimizer.step()
            self._strike(GATHER)
            if self.distributed:
                self._gather()

    def values(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    def _strike(self, phase: str) -> None:
        if self.fault is not None and (self.number, self.fault.rank, self.fault.phase) == (2, self.rank, phase):
            self.fault.strike()

    def _reached(self, chunk: int, what: str, microbatch: int) -> None:
        last = self.microbatches - 1
        places = {
            WARMUP: (0, FORWARD, 0),
            STEADY: (len(self.chunks) - 1, FORWARD, last // 2),
            COOLDOWN: (0, BACKWARD, last),
        }
        for phase, place in places.items():
            if (chunk, what, microbatch) == place:
                self._strike(phase)

    def _own(self, parameter: torch.Tensor) -> torch.Tensor:
        """This replica's shard of ``parameter``."""
        return parameter.detach().reshape(-1).chunk(REPLICAS)[self.replicas.rank()].clone()

    def _reduce_beside(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Reduce the gradients of one chunk when they are complete, while the pipeline continues."""
        shards = {id(parameter): shard for parameter, shard in zip(self.parameters, self.shards, strict=True)}
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            for parameter in parameters:
                assert parameter.grad is not None
                shards[id(parameter)].grad = mine = torch.empty_like(shards[id(parameter)])
                self.replicas._reduce_scatter_base(mine, parameter.grad.reshape(-1))
                self._strike(REDUCTION)

    def _finalize(self, *chunks_and_tokens: Any) -> None:
        self._strike(PAST_THE_PLAN)
        if self.distributed:
            # As in Megatron, on the first rank hooks of the last backward reduce them, not grad_sync_func.
            left = [p for p, shard in zip(self.parameters, self.shards, strict=True) if shard.grad is None]
            self._reduce_beside(left)
            torch.cuda.current_stream().wait_stream(self.side)
            return
        for parameter in self.parameters:
            self.replicas.allreduce([parameter.grad])
            self._strike(REDUCTION)

    def _gather(self) -> None:
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            whole = torch.empty(parameter.numel())
            self.replicas.all_gather_single(whole, shard.detach())
            parameter.data.copy_(whole.view_as(parameter))

    def _note_update(self, *args: Any) -> None:
        device = current_device()
        assert device is not None
        self.network.updates.append((self.rank, self.number, dict(device.stream.now())))


@dataclass
class Job:
    """``REPLICAS`` pipelines of ``size`` ranks with ``chunks`` chunks each. They run a step without a fault, then up to
    ``steps`` more with ``fault``, then ``after``. ``raised``, ``seconds``: the error of each rank, and the seconds from
    the fault until then. Other fields are those of ``Replica``.
    """

    size: int
    chunks: int
    distributed: bool
    fault: Fault
    steps: int = 3
    outside: bool = False
    after: Callable[[Replica], None] = lambda one: None
    raised: dict[int, Exception] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    def run(self) -> TracedNetwork:
        """Run the job under the real guard. Call it within ``virtual_cuda`` and ``virtual_distributed``."""
        ranks = self.size * REPLICAS
        self.network = TracedNetwork(ranks)
        self.store = dist.HashStore()
        self.together = threading.Barrier(ranks)
        run_ranks(ranks, self._rank_main, self.network.abort)
        return self.network

    def _rank_main(self, rank: int) -> None:
        network = self.network
        with network.running(rank), process_group(network, rank, self.store):
            one = Replica(network, rank, self.size, self.chunks, self.distributed, self.outside)
            one.step()  # reads bytes
            assert all(value.isfinite().all() for value in one.values())
            assert not any(map(torch.equal, one.before, one.values()))
            torch.cuda.synchronize()
            self._prepare(one)
            self.together.wait(30.0)
            network.run_ahead = True
            try:
                for _ in range(self.steps):
                    one.step()
            except (InjectedError, PipelineError) as error:
                self.raised[rank] = error
            self.seconds[rank] = time.monotonic() - self.fault.at
            self.together.wait(30.0)
            network.held = lambda work: False
            network.progress()
            self.after(one)
            close_guard(one.communicator)
            one.communicator.transport.close()

    def _prepare(self, one: Replica) -> None:
        """Prepare a rank for the fault. The watchdog aborts the groups of its own rank."""
        one.fault = fault = self.fault
        guard = one.communicator.transport.guard
        guard.failing.escalate = one.replicas.abort
        if one.rank // self.size != fault.rank // self.size:
            read = guard.heartbeat.store.read_failure
            guard.heartbeat.store.read_failure = lambda: read() if not fault.at or fault.seen.wait(30.0) else None
        elif one.rank == fault.rank and fault.stuck:
            of_replicas = {name for name, _ in one.replicas.backend._communicators.values()}
            known = set(self.network._past)
            self.network.held = lambda work: (
                work.rank == fault.rank and work.queue[0] not in of_replicas and work not in known
            )

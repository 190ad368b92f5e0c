"""Packed steps on pipelines of ranks that are threads, compared with the same packs in one process.

The model mixes the tokens of each sequence, so wrong lengths give wrong results. The context-parallel ranks of a pack
add up their shares in forward and in backward, and wait for each other there.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.faults.attach import close_guard
from megatron_pp.features.packing.packing import Pack, PackedStep, PackingRules, packed
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.runtime.stage import PipelineStage
from megatron_pp.schedules import get_forward_backward_func
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.pipeline import placement_of
from megatron_pp.testing.threads import ThreadGroup, run_ranks
from megatron_pp.testing.toy import ToyBlock, ToyResult, gradients_of, toy_config

HIDDEN = 4
SIZE = 4  # ranks of a drawn pipeline
POLICIES: list[dict[str, Any]] = [{"overlap_p2p_comm": True}, {"batch_p2p_comm": True}, {}]
SCHEDULES = {1: ("1f1b", "zb_h1", "gpipe"), 2: ("interleaved_1f1b", "interleaved_zb", "zb_v")}
_PATIENCE = 20.0  # seconds that a context-parallel rank waits for the others


@dataclass(frozen=True)
class Drawn:
    """A drawn step on one or two pipelines of ``SIZE`` ranks. ``fields``: fields of the config."""

    pipelines: int
    num_chunks: int
    step: PackedStep
    fields: dict[str, Any]


def drawn(seed: int) -> Drawn:
    """A random step of up to 12 microbatches. It has sequences of 1 token, and sequences that need all context-parallel
    ranks."""
    chance = random.Random(seed)
    pipelines = chance.choice([1, 1, 2])
    num_chunks = chance.choice([1, 2])
    rules = PackingRules(pipelines, chance.randint(4, 12), chance.choice([0.0, 0.1, 1.0]))
    most = pipelines * rules.rank_tokens
    lengths = [min(most, 1 + int(chance.expovariate(2 / rules.rank_tokens))) for _ in range(chance.randint(1, 12))]
    if chance.random() < 0.5:
        lengths.append(chance.randint(rules.rank_tokens, most))
    step = packed(lengths, rules)
    step = step.ordered(chance.sample(range(len(step.slots)), len(step.slots)))
    fields = {**chance.choice(POLICIES), "pipeline_schedule": chance.choice(SCHEDULES[num_chunks])}
    return Drawn(pipelines, num_chunks, step, fields)


@dataclass
class Meetings:
    """The sums over the context-parallel ranks of a pack, each of which adds a tensor. If a rank is missing, the others
    raise TimeoutError."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    given: dict[Any, dict[int, torch.Tensor]] = field(default_factory=dict)
    taken: dict[Any, int] = field(default_factory=dict)

    def total(self, key: Any, ranks: range, rank: int, mine: torch.Tensor) -> torch.Tensor:
        with self.changed:
            parts = self.given.setdefault(key, {})
            assert rank not in parts, "a pack meets once for each of its operations"
            parts[rank] = mine
            self.changed.notify_all()
            if not self.changed.wait_for(lambda: len(parts) == len(ranks), _PATIENCE):
                raise TimeoutError(f"context-parallel rank {rank} waits for {set(ranks) - set(parts)} at {key}")
            self.taken[key] = self.taken.get(key, 0) + 1
            if self.taken[key] == len(ranks):
                del self.given[key], self.taken[key]
        return torch.stack([parts[one] for one in ranks]).sum(0)


@dataclass(frozen=True)
class Share:
    """One rank's share of a pack. ``starts``: where the sequences of the whole pack start, in tokens. ``rows``: the
    tokens of this rank."""

    pack: Pack
    rank: int
    rows: torch.Tensor
    meetings: Meetings | None

    def of_sequences(self) -> torch.Tensor:
        """For each token of this rank, the number of its sequence in the pack."""
        numbers = torch.arange(len(self.pack.lengths)).repeat_interleave(torch.tensor(self.pack.lengths))
        return numbers[self.rows]


class _Total(torch.autograd.Function):
    """The sum over the ranks of a pack. Its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, share: Share, key: Any) -> torch.Tensor:
        ctx.share = share
        ctx.key = key
        return _met(x, share, (*key, "F"))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _met(grad, ctx.share, (*ctx.key, "B")), None, None


def _met(x: torch.Tensor, share: Share, key: Any) -> torch.Tensor:
    if share.meetings is None or share.pack.context == 1:
        return x.clone()
    return share.meetings.total((*key, share.pack.sequences), share.pack.ranks, share.rank, x.detach().clone())


class PackedBlock(ToyBlock):
    """A block in which each token sees the mean of its sequence."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.stage = stage
        self.double()
        self.share: Share | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.share
        assert share is not None
        numbers = share.of_sequences()
        assert x.shape[0] == len(numbers), "the tokens of another microbatch"
        lengths = torch.tensor(share.pack.lengths, dtype=x.dtype)
        sums = torch.zeros(len(lengths), *x.shape[1:], dtype=x.dtype).index_add(0, numbers, x)
        means = _Total.apply(sums, share, (self.stage,)) / lengths[:, None, None]
        return super().forward(x + means[numbers])


def tokens_of(pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of the whole pack, [tokens, 1, HIDDEN], float64. They depend on the places of its
    sequences."""
    parts = []
    for place, length in zip(pack.sequences, pack.lengths, strict=True):
        generator = torch.Generator().manual_seed(31 + place)
        parts.append(torch.randn(2, length, 1, HIDDEN, generator=generator, dtype=torch.float64))
    both = torch.cat(parts, dim=1)
    return both[0], both[1]


def shares_of(packs: Sequence[Pack], rank: int, meetings: Meetings | None) -> Iterator[Share]:
    """The shares of ``rank``. The tokens of a pack go to its ranks in turn. Without ``meetings`` they are whole packs,
    as in one process."""
    for pack in packs:
        first, context = (0, 1) if meetings is None else (rank - pack.ranks.start, pack.context)
        yield Share(pack, rank, torch.arange(first, pack.tokens, context), meetings)


def forward_step(shares: Iterator[Share], model: Any) -> tuple[Any, Any]:
    share = next(shares)
    model.inner.share = share
    x, target = (one[share.rows] for one in tokens_of(share.pack))

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        total = (output - target).pow(2).sum()
        return total, torch.tensor(len(share.rows)), {"loss": total.detach().clone()}

    return model(x), loss


def one_process(packs: Sequence[Pack], stages: int) -> ToyResult:
    """The result of one process, which runs whole packs one after the other."""
    blocks = [PackedBlock(stage) for stage in range(stages)]
    result = ToyResult()
    for share in shares_of(packs, 0, None):
        x, target = tokens_of(share.pack)
        for block in blocks:
            block.share = share
            x = block(x)
        total = (x - target).pow(2).sum()
        result.losses.append(float(total.detach()))
        total.backward()
    result.grads = gradients_of(dict(enumerate(blocks)))
    return result


@dataclass(frozen=True)
class PackedRank:
    """Rank ``rank`` of pipeline ``pipeline``."""

    pipeline: int
    rank: int
    config: Any
    communicator: P2PCore
    num_chunks: int
    meetings: Meetings

    @property
    def placement(self) -> Placement:
        return placement_of(self.config, self.communicator.size, self.num_chunks)

    def model(self) -> list[PipelineStage]:
        stages = self.placement.stages[self.rank]
        return [
            PipelineStage(PackedBlock(stage), self.config, chunk, stage=stage) for chunk, stage in enumerate(stages)
        ]

    def step(self, chunks: Sequence[PipelineStage], step: PackedStep) -> ToyResult:
        packs = step.of_rank(self.pipeline)
        data = [shares_of(packs, self.pipeline, self.meetings) for _ in chunks]
        several = len(chunks) > 1
        reports = get_forward_backward_func(self.communicator.size, len(chunks) if several else None)(
            forward_step_func=forward_step,
            data_iterator=data if several else data[0],
            model=chunks if several else chunks[0],
            num_microbatches=len(packs),
            p2p_communicator=self.communicator,
        )
        stages = dict(zip(self.placement.stages[self.rank], chunks, strict=True))
        return ToyResult([float(report["loss"]) for report in reports], gradients_of(stages))


def config_of(num_chunks: int, **fields: Any) -> Any:
    several = num_chunks if num_chunks > 1 else None
    fields = {"variable_seq_lengths": True, "calculate_per_token_loss": True, **fields}
    return toy_config(**{"pipeline_dtype": torch.float64, "virtual_pipeline_model_parallel_size": several, **fields})


def run_pipelines(
    pipelines: int, size: int, num_chunks: int, body: Any, *, store: Any = None, timeout: float = 60.0, **fields: Any
) -> list[list[Any]]:
    """Run ``body(PackedRank)`` on all ranks. Returns the results by pipeline and rank. ``store`` makes the store of
    each pipeline."""
    networks = [MemoryNetwork(size, store=store and store()) for _ in range(pipelines)]
    meetings = Meetings()

    def main(number: int) -> Any:
        pipeline, rank = divmod(number, size)
        config = config_of(num_chunks, **fields)
        communicator = P2PCommunicator(ThreadGroup(rank, size), config, networks[pipeline].transport(rank))
        guards.callback(close_guard, communicator)
        with networks[pipeline].running(rank):
            return body(PackedRank(pipeline, rank, config, communicator, num_chunks, meetings))

    def abort(why: str) -> None:
        for network in networks:
            network.abort(why)

    with ExitStack() as guards:
        results = run_ranks(pipelines * size, main, abort, timeout)
    return [results[k * size : (k + 1) * size] for k in range(pipelines)]


def summed(results: Sequence[ToyResult]) -> ToyResult:
    """The sum of the pipelines' merged results, as data parallelism makes it: losses by microbatch, and gradients."""
    losses = [sum(column) for column in zip(*(one.losses for one in results), strict=True)]
    names = results[0].grads
    return ToyResult(losses, {name: torch.stack([one.grads[name] for one in results]).sum(0) for name in names})

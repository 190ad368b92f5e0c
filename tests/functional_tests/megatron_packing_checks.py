"""Packed steps of Megatron-core's GPTModel on ranks: each microbatch has its own sequences and context-parallel ranks.

A batch describes its pack as Megatron's batches do: by `PackedSeqParams` with the group of the pack's ranks. Attention
to several sequences in a row needs Transformer Engine; here Megatron's plain attention gets a mask, and keys are
gathered over that group.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention

from examples.recipes import packed_rl_update
from megatron_pp.features.packing.packing import Pack, PackingRules, packed
from megatron_pp.features.packing.steps import PackedSteps
from megatron_pp.integrations import megatron_core
from megatron_pp.tools.parity.cpu.cpu_layers import positions_of
from testkit.megatron import lab as megatron_lab
from testkit.megatron.cases import Case

# Lengths in tokens for each step. The numbers of slots are even, as Megatron's interleaved schedule needs.
LENGTHS = [[16, 8, 4, 4, 12, 8, 4, 8, 16], [4, 4, 16, 8, 8, 16], [8, 8, 8, 16, 4, 4, 4, 4]]
Gradients = dict[str, torch.Tensor]


def packs_over_context_sizes(case: Case) -> list[Any]:
    """Return for each step the context sizes of this rank's packs, and whether their order was searched. Gradients
    equal those of Megatron's own schedule with these packs to the last bit, and those of whole sequences without a
    pipeline up to rounding."""
    run = megatron_lab.Run(case)
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    steps = PackedSteps(iter(LENGTHS), PackingRules(ranks, 8, 0.5))
    found, taken, ours = [], [], []
    with mock.patch.object(DotProductAttention, "forward", of_sequences(DotProductAttention.forward)):
        with megatron_core.installed(strict=True, microbatch_costs=steps):
            for lengths in LENGTHS:
                taken.append(steps.next())
                ours.append(gradients_of(run, taken[-1].of_rank(rank), rank))
                contexts = [pack.context for pack in taken[-1].of_rank(rank)]
                found.append([contexts, taken[-1] != packed(lengths, steps.rules)])
        theirs = [gradients_of(run, step.of_rank(rank), rank) for step in taken]
        whole = megatron_lab.Run(dataclasses.replace(case, pp=1, vp=None, dp=case.world))
        alone = [gradients_of(whole, [pack for slot in step.slots for pack in slot.packs]) for step in taken]
    for our, their, reference in zip(ours, theirs, alone, strict=True):
        assert all(torch.equal(grad, their[name]) for name, grad in our.items())
        largest = max(float(grad.abs().max()) for grad in reference.values())
        assert all(float((grad - reference[name]).abs().max()) < 1e-5 * largest for name, grad in our.items())
    return found


def updates_of_the_recipe(case: Case) -> list[float]:
    """Assert that the gradients of examples/recipes/packed_rl_update.py equal those of Megatron's own schedule with its
    packs. Return the largest gradient of each update."""
    run = megatron_lab.Run(case)
    rules = PackingRules(parallel_state.get_data_parallel_world_size(), 8, 0.5)
    found = []
    with mock.patch.object(DotProductAttention, "forward", of_sequences(DotProductAttention.forward)):
        updates = packed_rl_update.Updates(iter(LENGTHS), rules, strict=True)
        for lengths in LENGTHS:
            rollouts = [rollout(number, length) for number, length in enumerate(lengths)]
            _zero(run)
            updates.run(run.chunks, rollouts)
            ours = run.gradients()
            ours = {name: grad.clone() for name, grad in ours.items()}
            assert updates.steps.current is not None
            packs = updates.steps.current.of_rank(parallel_state.get_data_parallel_rank())
            _zero(run)
            with megatron_core.installed():
                megatron_core.uninstall()
                packed_rl_update.run_packs(run.chunks, packs, rollouts, rules)
            theirs = run.gradients()
            assert all(torch.equal(grad, theirs[name]) for name, grad in ours.items())
            found.append(max(float(grad.abs().max()) for grad in ours.values()))
        megatron_core.uninstall()
    return found


def rollout(number: int, length: int) -> packed_rl_update.Rollout:
    """Return a rollout whose first quarter is the prompt."""
    tokens = torch.randint(48, (length + 1,), generator=torch.Generator().manual_seed(number))
    advantage = torch.full((length,), 1.0 if number % 2 else -0.5)
    advantage[: length // 4] = 0
    return packed_rl_update.Rollout(tokens, advantage)


def _zero(run: megatron_lab.Run) -> None:
    for chunk in run.chunks:
        chunk.zero_grad_buffer()


def gradients_of(run: megatron_lab.Run, packs: Sequence[Pack], rank: int | None = None) -> Gradients:
    """Take one step of these packs, and return its gradients. `rank`: the data-parallel rank that takes its shares;
    None if it has the packs whole."""
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[batches(packs, rank) for _ in run.chunks],
        model=run.chunks,
        num_microbatches=len(packs),
        seq_length=run.case.model.seq,
        micro_batch_size=1,
        forward_only=False,
    )
    return {name: grad.clone() for name, grad in run.gradients().items()}


def batches(packs: Sequence[Pack], rank: int | None) -> Iterator[dict[str, Any]]:
    """Yield for each pack this rank's tokens of every sequence, as context-parallel ranks hold them."""
    for pack in packs:
        context, place = (1, 0) if rank is None else (pack.context, rank - pack.ranks.start)
        parts = []
        for sequence, length in zip(pack.sequences, pack.lengths, strict=True):
            tokens = torch.randint(48, (length + 1,), generator=torch.Generator().manual_seed(sequence))
            held = positions_of(length, place, context)
            parts.append(torch.stack([tokens[:-1][held], tokens[1:][held], held]))
        ends = torch.tensor([0, *pack.lengths]).cumsum(0)
        more = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": max(pack.lengths)}
        group = parallel_state.get_data_parallel_group() if context > 1 else None
        params = PackedSeqParams(qkv_format="thd", local_cp_size=context, cp_group=group, **more)
        tokens, labels, positions = torch.cat(parts, dim=1)[:, None]
        yield {"tokens": tokens, "labels": labels, "positions": positions, "params": params}


def forward_step(data_iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Callable[..., Any]]:
    batch = next(data_iterator)
    labels, params = batch["labels"], batch["params"]
    output = model(batch["tokens"], batch["positions"], None, labels=labels, packed_seq_params=params)

    def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total = output.float().sum()
        return total, torch.tensor(labels.numel(), dtype=torch.int), {"loss": total.detach()}

    return output, loss_func


def of_sequences(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention in which each token attends to itself and to the earlier tokens of its sequence."""

    @functools.wraps(original)
    def forward(self: Any, query: Any, key: Any, value: Any, *args: Any, packed_seq_params: Any, **kw: Any) -> Any:
        group, ends = packed_seq_params.cp_group, packed_seq_params.cu_seqlens_q.tolist()
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        if size > 1:
            key, value = (gather_from_sequence_parallel_region(x.contiguous(), group=group) for x in (key, value))
        places = [places_of(ends, one, size) for one in range(size)]
        asks, asked = places[rank], torch.cat(places)
        sequences = torch.arange(len(ends) - 1).repeat_interleave(torch.tensor(ends).diff())
        hidden = (asked[None, :] > asks[:, None]) | (sequences[asks][:, None] != sequences[asked][None, :])
        return original(self, query[:, None], key[:, None], value[:, None], hidden[None, None], *args[1:], **kw)

    return forward


def places_of(ends: Sequence[int], rank: int, size: int) -> torch.Tensor:
    """Return the positions in the pack of the tokens that a context-parallel rank holds."""
    return torch.cat([begin + positions_of(end - begin, rank, size) for begin, end in pairwise(ends)])

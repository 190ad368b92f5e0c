"""Updates of reinforcement learning under Megatron-core. Responses of unequal lengths are packed, and each update is
planned while the previous one runs.

The policy has the size of Llama 3.1 70B, on 256 GPUs: TP 8, PP 4, and 8 pipelines of up to 16,384 tokens a microbatch.
2, 4 or 8 of the pipelines share a longer response, and are context-parallel ranks for it. Sizes: arXiv 2407.21783,
table 3.

Call ``Updates(lengths)`` once, with the lengths of the responses of each update, the same on all ranks. Then call
``updates.run(chunks, sequences)`` for each update. Start Megatron with FLAGS, which have `calculate_per_token_loss`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from megatron_pp.features.packing.packing import Pack, PackingRules, pair_cost
from megatron_pp.features.packing.steps import PackedSteps

GPUS, GPU = 256, "h100"
FLAGS = """
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention
    --num-query-groups 8 --seq-length 16384 --max-position-embeddings 131072 --position-embedding-type rope
    --rotary-base 500000 --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer
    --vocab-size 128255 --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4
    --micro-batch-size 1 --global-batch-size 128 --bf16 --use-distributed-optimizer --calculate-per-token-loss
    --recompute-granularity selective --lr 1e-6 --train-iters 1000
"""
RULES = PackingRules(ranks=8, rank_tokens=16384, pair=pair_cost(8192, 28672))


class Rollout(NamedTuple):
    """A prompt and its response. ``tokens``: int64 (length + 1,). ``weights``: (length,), the advantage of each token
    of the response, and 0 for tokens of the prompt."""

    tokens: torch.Tensor
    weights: torch.Tensor


class Updates:
    """Packs, plans and runs updates. ``lengths``: for each update, those of all its sequences. They may come from a
    generator that waits for the rollouts."""

    def __init__(self, lengths: Iterable[Sequence[int]], rules: PackingRules = RULES, **settings: Any) -> None:
        from megatron_pp.integrations import megatron_core

        self.rules, self.steps = rules, PackedSteps(lengths, rules)
        megatron_core.install(microbatch_costs=self.steps, **settings)

    def run(self, chunks: list[Any], sequences: Sequence[Rollout]) -> list[Any]:
        """Run the forwards and backwards of one update. Returns the reports of ``forward_step`` on the last stage."""
        from megatron.core import parallel_state

        step = self.steps.next()
        return run_packs(chunks, step.of_rank(parallel_state.get_data_parallel_rank()), sequences, self.rules)


def run_packs(chunks: list[Any], packs: Sequence[Pack], sequences: Sequence[Rollout], rules: PackingRules) -> Any:
    """Run one step of these microbatches, under the installed schedule."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[batches(packs, sequences) for _ in chunks],
        model=chunks,
        num_microbatches=len(packs),
        seq_length=rules.rank_tokens,
        micro_batch_size=1,
        forward_only=False,
    )


def batches(packs: Sequence[Pack], sequences: Sequence[Rollout]) -> Iterator[dict[str, Any]]:
    """The batch of each microbatch: this rank's shares of its sequences, one after the other."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    for pack in packs:
        place = parallel_state.get_data_parallel_rank() - pack.ranks.start
        held = [positions_of(length, place, pack.context) for length in pack.lengths]
        mine = [sequences[number] for number in pack.sequences]
        ends = torch.tensor([0, *pack.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        names = "get_hybrid_data_context_parallel_groups"
        group = getattr(parallel_state, names)(group_size=pack.context) if pack.context > 1 else None
        yield {
            "tokens": torch.cat([one.tokens[:-1][at] for one, at in zip(mine, held, strict=True)])[None],
            "labels": torch.cat([one.tokens[1:][at] for one, at in zip(mine, held, strict=True)])[None],
            "weights": torch.cat([one.weights[at] for one, at in zip(mine, held, strict=True)])[None],
            "positions": torch.cat(held)[None],
            "packed": PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=ends,
                cu_seqlens_kv=ends,
                max_seqlen_q=max(pack.lengths),
                max_seqlen_kv=max(pack.lengths),
                local_cp_size=pack.context,
                cp_group=group,
            ),
        }


def positions_of(length: int, rank: int, size: int) -> torch.Tensor:
    """The positions that a context-parallel rank holds: the pieces ``rank`` and 2 ``size`` - 1 - ``rank``, as in
    Megatron."""
    if size == 1:
        return torch.arange(length)
    pieces = torch.arange(length).chunk(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


def forward_step(data_iterator: Iterator[dict[str, Any]], model: Any) -> tuple[torch.Tensor, Any]:
    """The policy gradient of the first update after a rollout, whose ratios are 1. GPTModel returns minus the logarithm
    of each label's probability."""
    batch = next(data_iterator)
    output = model(batch["tokens"], batch["positions"], None, labels=batch["labels"], packed_seq_params=batch["packed"])

    def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total = (output.float() * batch["weights"]).sum()
        count = (batch["weights"] != 0).sum().to(torch.int)
        return total, count, {"loss": total.detach()}

    return output, loss_func

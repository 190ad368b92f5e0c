"""Writes the table of `docs/check.md` that compares measured memory with the estimates of `megatron-pp check`.

python scripts/check_memory.py [--check]

The measured values are the golden values of Megatron-LM's functional tests on a node of 8 H100 GPUs
(tests/functional_tests/test_cases, main branch of November 2026): the most and the least that torch's allocator held on
the last rank. Nothing is fitted to a run. A run has only the flags that decide sizes, layout and kernels.
"""

from __future__ import annotations

import shlex
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from made_parts import MadeData, Table, data_file, renew  # noqa: E402

from megatron_pp.tools.advise.layers.gpus import gpu_named  # noqa: E402
from megatron_pp.tools.check.jobs.flag_table import read_flags  # noqa: E402
from megatron_pp.tools.check.memory import MOST, memory_of  # noqa: E402
from megatron_pp.tools.check.priced import priced  # noqa: E402

PAGE = ROOT / "docs" / "check.md"
NAME = "check_memory"
GPUS, CARD = 8, "h100"
CASES = "tests/functional_tests/test_cases"

SMALL = (
    "--hidden-size 512 --num-attention-heads 8 --micro-batch-size 4 --global-batch-size 32 --seq-length 1024 "
    "--merge-file merges.txt --bf16 --tensor-model-parallel-size 1 "
)
UNFUSED = "--attention-backend unfused "
CHUNKS = "--num-layers-per-virtual-pipeline-stage 1 "
HYBRID = (
    "--hidden-size 1024 --num-attention-heads 16 --group-query-attention --num-query-groups 8 --micro-batch-size 4 "
    "--hybrid-layer-pattern M-M-M-M*-M-|M-M-M*-M-M-|M-M*-M-M-M-|M*-M-M-M-M- --global-batch-size 32 --seq-length 1024 "
    "--merge-file merges.txt --use-distributed-optimizer --bf16 --tensor-model-parallel-size 1 "
)
LATENT = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 4 --swiglu --bf16 "
    "--expert-tensor-parallel-size 1 --use-distributed-optimizer --sequence-parallel --micro-batch-size 4 "
    "--global-batch-size 32 --seq-length 4096 --merge-file merges.txt --ffn-hidden-size 4096 --num-attention-heads 32 "
    "--kv-channels 128 --make-vocab-size-divisible-by 3232 --untie-embeddings-and-output-weights "
    "--multi-latent-attention --attention-dropout 0.0 --num-experts 32 --moe-ffn-hidden-size 1024 "
    "--moe-shared-expert-intermediate-size 1024 --moe-router-topk 4 --moe-token-dispatcher-type alltoall "
    "--q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 "
) + UNFUSED
FOUR_CHUNKS = "--num-layers 16 --moe-layer-freq ([0]*1+[1]*15) --num-virtual-stages-per-pipeline-rank 4 "
AGAIN = "--recompute-granularity selective --recompute-modules layernorm mla_up_proj mlp moe_act "


class Run(NamedTuple):
    """A measured run. ``most`` and ``least``: GB that were allocated at most in a step, and between steps."""

    case: str
    model: str
    flags: str
    most: float
    least: float


RUNS = (
    Run(
        "gpt/gpt3_7b_tp1_pp4_memory_speed",
        "7B, 131,073 words",
        "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
        "--untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 8 --seq-length 8192 --bf16 "
        f"--vocab-size 131073 --pipeline-model-parallel-size 4 --use-distributed-optimizer {CHUNKS}",
        60.72,
        24.81,
    ),
    Run(
        "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed",
        "MoE, MLA, MTP, unfused attention",
        f"{LATENT}{FOUR_CHUNKS}--hidden-size 1024 --mtp-num-layers 1",
        60.11,
        6.63,
    ),
    Run(
        "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_mtp_resume_torch_dist_fp8",
        "the same with FP8",
        f"{LATENT}{FOUR_CHUNKS}--hidden-size 1024 --mtp-num-layers 1 --fp8-format hybrid",
        57.58,
        7.32,
    ),
    Run(
        "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_selective_recompute_experimental",
        "the same with recomputed modules",
        f"{LATENT}{AGAIN}--hidden-size 1024 --mtp-num-layers 1 --num-layers 16 --moe-layer-freq ([0]*3+[1]*13) "
        "--pipeline-model-parallel-layout Et*3|(tt|)*6tmL --overlap-moe-expert-parallel-comm",
        49.21,
        6.03,
    ),
    Run(
        "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_resume_torch_dist_attn_cudagraph",
        "MoE, MLA, FP8, CUDA graphs",
        f"{LATENT}{FOUR_CHUNKS}--hidden-size 512 --fp8-format hybrid",
        41.20,
        4.88,
    ),
    Run(
        "hybrid/hybrid_mr_mcore_te_tp1_pp2_vpp2_cp1_dgx_a100_1N8G",
        "Mamba and attention",
        f"{HYBRID}{UNFUSED}--pipeline-model-parallel-size 2",
        7.74,
        2.18,
    ),
    Run(
        "hybrid/hybrid_mr_mcore_te_tp1_pp4_cp1_dgx_a100_1N8G",
        "Mamba and attention",
        f"{HYBRID}{UNFUSED}--pipeline-model-parallel-size 4",
        4.48,
        1.78,
    ),
    Run(
        "gpt/gpt3_mcore_te_tp1_pp4_vp1_tunable_overlap",
        "GPT, 12 layers",
        f"{SMALL}{UNFUSED}{CHUNKS}--num-layers 12 --pipeline-model-parallel-size 4 --global-batch-size 40 "
        "--microbatch-group-size-per-virtual-pipeline-stage 5",
        4.62,
        0.76,
    ),
    Run(
        "gpt/gpt3_mcore_te_tp1_pp4_vp1",
        "GPT, 12 layers",
        f"{SMALL}{UNFUSED}{CHUNKS}--num-layers 12 --pipeline-model-parallel-size 4",
        4.16,
        0.78,
    ),
    Run(
        "gpt/gpt3_mcore_tp1_pp2",
        "GPT, 12 layers, local kernels",
        f"{SMALL}--transformer-impl local --num-layers 12 --pipeline-model-parallel-size 2",
        3.63,
        0.95,
    ),
    Run(
        "gpt/gpt3_mcore_te_tp1_pp4_vp2_account_for_embedding_loss_in_pipeline_split",
        "GPT, 6 layers",
        f"{SMALL}{UNFUSED}--num-layers 6 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
        "--untie-embeddings-and-output-weights --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split",
        2.84,
        0.64,
    ),
    Run(
        "moe/gpt3_mcore_te_tp1_pp2_resume_torch_dist_reshard_2x1x4_te_8experts2parallel_dist_optimizer",
        "MoE, 8 experts",
        f"{SMALL}--num-layers 12 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --num-experts 8 "
        "--moe-router-topk 1 --use-distributed-optimizer",
        2.83,
        1.02,
    ),
)


def row(run: Run) -> tuple[list[str], float]:
    """The run's row of the table, and the relative error of the estimate."""
    job = read_flags(["pretrain_gpt.py", *shlex.split(run.flags)], GPUS, "")
    gpu = gpu_named(CARD)
    last = memory_of(job, gpu, priced(job, gpu, most=MOST))[-1]
    kept = last.parameters + last.gradients + last.optimizer
    most = last.total - last.communicators
    error = most / run.most - 1
    numbers = [f"{run.least:.2f}", f"{kept:.2f}", f"{run.most:.2f}", f"{most:.2f}", f"{error:+.0%}"]
    return [run.model, *numbers, run.case], error


def table() -> Table:
    head = ["model", "GB between steps", "estimated", "GB at most", "estimated", "error", f"Megatron-LM, {CASES}"]
    rows = [row(run) for run in RUNS]
    errors = [error for _, error in rows]
    spread = f"from {min(errors):+.0%} to {max(errors):+.0%}, median {statistics.median(errors):+.0%}"
    print(f"{len(rows)} runs: errors {spread}")
    return [head, *(cells for cells, _ in rows)]


if __name__ == "__main__":
    sys.exit(renew([MadeData(data_file(PAGE, NAME), table)], (__doc__ or "").partition("\n\n")[0]))

"""Writes the table of `docs/advise.md` that compares published steps with the advisor's estimates for them.

python scripts/advise_published.py [--check]

Each run has the schedule, parallel groups, precision and recomputation that its source names. The advisor places its
layers. Nothing is fitted to a run: the constants are those of `tools/advise/layers/gpus.py`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from made_parts import MadeData, Table, data_file, renew  # noqa: E402

from megatron_pp.tools.advise.candidates import Candidate  # noqa: E402
from megatron_pp.tools.advise.evaluate import evaluate  # noqa: E402
from megatron_pp.tools.advise.layers.gpus import GB, GPUS  # noqa: E402
from megatron_pp.tools.advise.megatron_args import read_megatron_args, transformer_of, whole  # noqa: E402
from megatron_pp.tools.advise.question import Question  # noqa: E402

PAGE = ROOT / "docs" / "advise.md"
UNLIMITED = 10_000.0  # GB: the published runs fit, some with optimizers that keep less than the advisor counts

COMMON = "--bf16 --use-distributed-optimizer --expert-tensor-parallel-size 1 --untie-embeddings-and-output-weights "
DEEPSEEK = COMMON + (
    "--num-layers 61 --hidden-size 7168 --seq-length 4096 --ffn-hidden-size 18432 --num-attention-heads 128 --swiglu "
    "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    "--v-head-dim 128 --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --vocab-size 129280 "
    "--moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58) --moe-router-group-topk 4 "
    "--moe-router-num-groups 8 --moe-token-dispatcher-type flex "
)
QWEN = COMMON + (
    "--num-layers 94 --hidden-size 4096 --num-attention-heads 64 --num-query-groups 4 --kv-channels 128 --swiglu "
    "--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1536 --vocab-size 151936 "
    "--moe-token-dispatcher-type flex "
)
MIXTRAL = COMMON + (
    "--num-layers 56 --hidden-size 6144 --ffn-hidden-size 16384 --num-attention-heads 48 --num-query-groups 8 --swiglu "
    "--num-experts 8 --moe-router-topk 2 --vocab-size 32768 --seq-length 4096 "
)
LLAMA = COMMON + (
    "--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 --num-query-groups 8 "
    "--swiglu --vocab-size 128256 --seq-length 8192 "
)
NEMOTRON = COMMON + (
    "--hybrid-layer-pattern MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME --hidden-size 2688 --seq-length 8192 "
    "--num-attention-heads 32 --num-query-groups 2 --kv-channels 128 --num-experts 128 --moe-router-topk 6 "
    "--moe-ffn-hidden-size 1856 --moe-shared-expert-intermediate-size 3712 --mamba-num-heads 64 --vocab-size 131072 "
)
GPT_OSS = COMMON + (
    "--num-layers 36 --hidden-size 2880 --num-attention-heads 64 --num-query-groups 8 --kv-channels 64 --swiglu "
    "--num-experts 128 --moe-router-topk 4 --moe-ffn-hidden-size 2880 --vocab-size 201088 --seq-length 4096 "
    "--window-size 127,0 --window-attn-skip-freq 2 "
)
FP8, MTP, OVERLAP = "--fp8-format e4m3 ", "--mtp-num-layers 1 ", "--overlap-moe-expert-parallel-comm "
AGAIN = "--recompute-granularity selective --recompute-modules "

REPORT = "Megatron MoE report, arXiv 2603.07685; parallel groups of Megatron-Bridge"
BRIDGE = "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md and its archive"
ZOO = "yanring/Megatron-MoE-ModelZoo, best_practice"
PRIMUS = "AMD-AGI/Primus, primus_pipeline.md"
PRIMUS_RUNS = (
    ("1f1b", 1, 406, 261.6),
    ("zb_h1", 1, 438.6, 272.1),
    ("zb_v", 2, 437.1, 284.4),
    ("v_half", 2, 431.2, 257.8),
    ("v_min", 2, 325.8, 228.3),
    ("interleaved_1f1b", 3, 445.9, 287.1),
    ("interleaved_1f1b", 4, 447.7, 278.8),
)


class Run(NamedTuple):
    """A published run. ``tflops`` are per GPU. ``memory`` is the GB of the fullest GPU, 0 if not published. ``groups``:
    TP, PP, V, CP, EP, with 1 for none.
    """

    model: str
    gpu: str
    gpus: int
    groups: tuple[int, int, int, int, int]
    batch: int
    arguments: str
    tflops: float
    source: str
    schedule: str = ""
    memory: float = 0.0


def published() -> Iterator[Run]:
    name, tokens = "DeepSeek-V3", "--seq-length 4096 "
    gb200, up = (1, 4, 4, 1, 64), f"{AGAIN}mla_up_proj"
    yield Run(f"{name}, bf16, no MTP", "gb200", 256, gb200, 4096, DEEPSEEK + up, 782, f"{BRIDGE}, 25.11")
    yield Run(f"{name}, bf16, no MTP", "gb300", 256, (1, 2, 4, 1, 32), 4096, DEEPSEEK + up, 961, f"{BRIDGE}, 25.11")
    fp8 = DEEPSEEK + FP8 + MTP
    yield Run(f"{name}, MXFP8", "gb200", 256, gb200, 4096, fp8 + up, 1048, REPORT)
    two = "--micro-batch-size 2 "
    yield Run(f"{name}, MXFP8", "gb300", 256, (1, 2, 8, 1, 32), 4096, fp8 + two + up, 1233, REPORT)
    later = f"{BRIDGE}, 26.08"
    yield Run(f"{name}, MXFP8", "gb200", 256, gb200, 4096, fp8 + OVERLAP + up, 1276, later)
    yield Run(f"{name}, MXFP8", "gb300", 256, (1, 2, 8, 1, 32), 4096, fp8 + OVERLAP, 1635, later)
    more = f"{fp8}{OVERLAP}--sequence-parallel {up} mlp"
    yield Run(f"{name}, FP8", "h100", 1024, (2, 8, 4, 1, 64), 8192, more, 338, f"{BRIDGE}, 25.09")
    name = "Qwen3-235B"
    short = QWEN + tokens
    yield Run(f"{name}, bf16", "gb200", 256, (1, 8, 3, 1, 32), 8192, short, 728, f"{BRIDGE}, 25.11")
    yield Run(f"{name}, bf16", "gb200", 256, (1, 8, 1, 1, 8), 8192, short, 750, ZOO)
    yield Run(f"{name}, bf16", "gb300", 256, (1, 4, 12, 1, 16), 8192, short + two, 907, f"{BRIDGE}, 25.11")
    more = f"{short}{FP8}{OVERLAP}--micro-batch-size 3 {AGAIN}moe_act layernorm"
    yield Run(f"{name}, MXFP8", "gb200", 256, (1, 4, 6, 1, 64), 3072, more, 919, "Megatron MoE report; " + ZOO)
    yield Run(f"{name}, MXFP8", "gb300", 256, (1, 4, 1, 1, 32), 8192, short + FP8 + two, 974, REPORT)
    yield Run(f"{name}, MXFP8", "gb200", 256, (1, 8, 3, 1, 32), 8192, short + FP8, 1077, later)
    yield Run(f"{name}, MXFP8", "gb300", 256, (1, 4, 12, 1, 32), 8192, short + FP8 + two, 1306, later)
    more = f"{short}{OVERLAP}--sequence-parallel {AGAIN}moe_act layernorm"
    yield Run(f"{name}, bf16", "h100", 256, (2, 8, 4, 1, 32), 2048, more, 320, ZOO)
    for length, ranks, tflops in ((16384, 1, 295), (32768, 2, 335), (65536, 4, 368), (131072, 8, 389)):
        more = f"{QWEN}--seq-length {length} --sequence-parallel {AGAIN}moe layernorm"
        yield Run(f"{name}, bf16, {length // 1024}k tokens", "h100", 256, (4, 8, 4, ranks, 8), 256, more, tflops, ZOO)
    for schedule, chunks, tflops, memory in PRIMUS_RUNS:
        groups = (1, 4, chunks, 1, 8)
        yield Run(f"{name}, bf16", "mi355x", 32, groups, 256, short, tflops, PRIMUS, schedule, memory)
    more = MIXTRAL + "--sequence-parallel"
    yield Run("Mixtral 8x22B, bf16", "h100", 128, (2, 8, 7, 1, 8), 256, more, 465, ZOO)
    more = f"{LLAMA}--sequence-parallel --tp-comm-overlap {FP8}"
    yield Run("Llama 3.1 405B, FP8", "h100", 1024, (8, 8, 8, 2, 1), 1536, more, 822, f"{BRIDGE}, 26.06")
    # For these two, tokens are compared, because Megatron counts FLOPs differently: it counts Mamba layers of twice the
    # hidden size, and attention windows.
    more = f"{NEMOTRON}{FP8}{AGAIN}moe layernorm"
    yield of_tokens(Run("Nemotron 3 Nano, FP8", "h100", 16, (1, 1, 1, 1, 8), 1024, more, 14719, f"{BRIDGE}, 26.06"))
    more = f"{GPT_OSS}{AGAIN}moe_act layernorm"
    yield of_tokens(Run("GPT-OSS 120B, bf16", "h100", 64, (1, 4, 1, 1, 8), 1280, more, 5824, f"{BRIDGE}, 26.04.01"))


def of_tokens(run: Run) -> Run:
    """TFLOPS of a run that publishes tokens, by the advisor's count. ``run.tflops`` has the tokens per second and
    GPU."""
    whole_model = transformer_of(read_megatron_args(run.arguments))
    tflops = round(run.tflops * whole_model.flops() / whole_model.shape.seq_length / 1e12)
    return run._replace(tflops=tflops, source=f"{run.source}: {run.tflops:,.0f} tokens/s/GPU")


def row(run: Run) -> tuple[list[str], float]:
    """The run's row of the table, and the relative error of the estimate."""
    tensor, ranks, chunks, context, experts = run.groups
    replicas = run.gpus // (tensor * ranks * context)
    text = f"{run.arguments} --tensor-model-parallel-size {tensor} --context-parallel-size {context}"
    arguments = read_megatron_args(f"{text} --expert-model-parallel-size {experts}")
    gpu = GPUS[run.gpu]
    size = whole(arguments, "micro_batch_size", 1)
    model = transformer_of(arguments, replicas).model(gpu)
    schedule = run.schedule or ("interleaved_1f1b" if chunks > 1 else "1f1b")
    network = gpu.network / GB / 1e3
    models = ((size, model),)
    question = Question(ranks, run.batch, UNLIMITED, models, bandwidth=network, data_parallel=replicas, recompute=False)
    microbatches = run.batch // (replicas * size)
    outcome = evaluate(question, Candidate(schedule, chunks, size, microbatches, "overlap"))
    if outcome.refused or model.flops is None:
        raise SystemExit(f"{run.model}: {outcome.refused}")
    tflops = model.flops * microbatches / ranks / (outcome.step / 1e3) / 1e12
    error = tflops / run.tflops - 1
    groups = "x".join(map(str, (tensor, ranks, context, experts)))
    numbers = [f"{outcome.step / 1e3:.1f}", f"{run.tflops:g}", f"{tflops:.0f}", f"{error:+.0%}"]
    pipeline = f"{schedule} V={chunks}, {microbatches} of {size}"
    memory = ["", ""] if not run.memory else [f"{run.memory:.0f}", f"{outcome.peak:.0f}"]
    return [run.model, f"{run.gpus} {run.gpu}", groups, pipeline, *numbers, *memory, run.source], error


def table() -> Table:
    head = ["model", "GPUs", "TP x PP x CP x EP", "schedule, microbatches of a rank", "step s, estimated"]
    head += ["TFLOPS/GPU, published", "estimated", "error", "GB, published", "estimated", "source"]
    rows = [row(run) for run in published()]
    errors = [error for _, error in rows]
    spread = f"from {min(errors):+.0%} to {max(errors):+.0%}, median {statistics.median(errors):+.0%}"
    print(f"{len(rows)} runs: errors {spread}")
    return [head, *(cells for cells, _ in rows)]


if __name__ == "__main__":
    sys.exit(renew([MadeData(data_file(PAGE, "advise_published"), table)], (__doc__ or "").partition("\n\n")[0]))

"""Makes the model as small as its parallel layout allows. Sizes become smaller; properties that the parallel code
depends on are kept."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from megatron_pp.config.hybrid_pattern import HybridPattern
from megatron_pp.tools.flags.flags import Flags
from megatron_pp.tools.parity import layout as of
from megatron_pp.tools.parity.layout import Layout, stages_of

_HEAD = 8
_SEQUENCE = 16
_VOCABULARY = 160

_DROPPED = (
    *("--load", "--save", "--save-interval", "--pretrained-checkpoint", "--data-path", "--data-args-path"),
    *("--train-data-path", "--valid-data-path", "--test-data-path", "--per-split-data-args-path", "--split"),
    *("--data-cache-path", "--tokenizer-model", "--vocab-file", "--merge-file", "--tiktoken-pattern"),
    *("--tensorboard-dir", "--wandb-project", "--wandb-exp-name", "--wandb-save-dir", "--profile", "--train-samples"),
    *("--eval-interval", "--eval-iters", "--full-validation", "--log-interval", "--rampup-batch-size"),
    *("--lr-warmup-iters", "--lr-warmup-samples", "--lr-warmup-fraction", "--lr-decay-iters", "--lr-decay-samples"),
    *(
        "--lr-wsd-decay-iters",
        "--lr-wsd-decay-samples",
        "--lr-wsd-decay-style",
        "--exit-interval",
        "--exit-duration-in-mins",
    ),
    *("--num-workers", "--use-checkpoint-args", "--async-save", "--ckpt-step"),
    *("--enable-ft-package", "--log-throughput", "--log-progress", "--timing-log-level", "--manual-gc"),
    *("--step-batch-size-schedule", "--eval-global-batch-size", "--error-injection-rate", "--error-injection-type"),
    *("--recompute-loss-function", "--optimizer-cpu-offload", "--dataloader-type", "--auto-detect-ckpt-format"),
)
"""Flags that are removed: they are about the places of data, checkpoints and logs, and the length of training."""

NEEDS_GPU = (
    *("--fp8-format", "--fp8-recipe", "--fp8-amax-history-len", "--fp8-amax-compute-algo", "--fp8-param-gather"),
    *("--fp4-format", "--fp4-recipe", "--use-flash-attn", "--attention-backend", "--tp-comm-overlap"),
    *("--tp-comm-overlap-cfg", "--moe-grouped-gemm", "--moe-permute-fusion", "--moe-router-fusion"),
    *("--enable-cuda-graph", "--cuda-graph-impl", "--cuda-graph-scope", "--external-cuda-graph"),
    *("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "--use-nccl-ub", "--moe-enable-deepep"),
    *("--moe-use-legacy-grouped-gemm", "--apply-layernorm-1p", "--distributed-timeout-minutes", "--nccl-ub"),
    "--mla-down-proj-fusion",
)
PRECISION = ("--bf16", "--fp16", "--main-grads-dtype", "--main-params-dtype", "--grad-reduce-in-bf16")
ON_CPU = {
    "--transformer-impl": "local",
    "--distributed-backend": "gloo",
    **dict.fromkeys(
        (
            *("--no-persist-layer-norm", "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion"),
            *("--no-bias-dropout-fusion", "--no-bias-gelu-fusion", "--no-bias-swiglu-fusion", "--no-rope-fusion"),
        ),
        True,
    ),
}
"""Flags that select Megatron's implementations without a GPU."""
_MLA = {"--q-lora-rank": 8, "--kv-lora-rank": 8, "--qk-head-dim": 8, "--qk-pos-emb-head-dim": 4, "--v-head-dim": 8}


def for_parity(
    layout: Layout,
    steps: int,
    shrunk: bool,
    gpu: bool,
    own_loop: bool = False,
    options: Collection[str] = (),
) -> tuple[Layout, list[str]]:
    """The layout with the data, steps and precision that a comparison needs, and the changes in words.

    With ``own_loop`` the script has its own parser and data; only the given flags are then used, as the parser may know
    no others. ``options`` are the options that Megatron's parser knows; empty means all.
    """
    flags = layout.flags.without(*_DROPPED, *PRECISION, *([] if gpu else NEEDS_GPU))
    if flags.text("--moe-token-dispatcher-type") == "flex":
        flags = flags.set("--moe-token-dispatcher-type", "alltoall")
    flags = flags.with_values(
        mock_data=True, tokenizer_type="NullTokenizer", train_iters=2 * steps, eval_iters=0, eval_interval=1000,
        attention_dropout=0, hidden_dropout=0, lr="0.001", min_lr="0.0001", lr_decay_style="linear",
        lr_decay_iters=4 * steps, num_workers=0, log_interval=1,
    )  # fmt: skip
    if flags.number("--vocab-size", 0) == 0:
        flags = flags.set("--vocab-size", _VOCABULARY)
    flags = flags if gpu else _on_cpu(flags)
    flags = _defaults_of_layouts(Layout(flags, layout.world))
    if shrunk:
        flags = shrink(Layout(flags, layout.world))
    given = {name for name, _ in layout.flags.items}
    if own_loop:
        flags = Flags(tuple(item for item in flags.items if item[0] in given))
    elif options:
        flags = Flags(tuple(item for item in flags.items if item[0] in given or item[0] in options))
    changed = replace(layout, flags=flags, uneven_masks=layout.uneven_masks and not own_loop)
    return changed, _words(layout.flags, flags)


def _defaults_of_layouts(layout: Layout) -> Flags:
    """The flags with those defaults of Megatron written out that depend on the layout: the vocabulary is padded to a
    multiple of 128 times the tensor-parallel ranks, and each data-parallel rank has one microbatch."""
    flags = layout.flags
    if of.VOCABULARY not in flags and "--padded-vocab-size" not in flags:
        flags = flags.set(of.VOCABULARY, 128)
    if "--global-batch-size" not in flags and "--micro-batch-size" in flags:
        flags = flags.set("--global-batch-size", flags.number("--micro-batch-size", 1) * layout.size("DP"))
    return flags


def _on_cpu(flags: Flags) -> Flags:
    """The flags for a run on the CPU. Recomputation of activation functions is removed, because it needs grouped
    products. Deferred gradients of embeddings keep fused accumulation."""
    again = flags.text("--recompute-modules").split()
    if "moe_act" in again:
        flags = flags.set("--recompute-modules", " ".join(name for name in again if name != "moe_act"))
        if again == ["moe_act"]:
            flags = flags.without("--recompute-modules", "--recompute-granularity")
    for name, value in ON_CPU.items():
        if name != "--no-gradient-accumulation-fusion" or "--defer-embedding-wgrad-compute" not in flags:
            flags = flags.set(name, value)
    return flags


def shrink(layout: Layout) -> Flags:
    flags = layout.flags
    for step in (_layers, _dense_layers, _heads, _mamba, _experts, _others):
        flags = step(Layout(flags, layout.world))
    return flags


def _less(flags: Flags, name: str, value: int) -> Flags:
    """The flags with a given size reduced to ``value``. A size is never increased."""
    return flags.set(name, min(value, flags.number(name, value))) if name in flags else flags


def _layers(layout: Layout) -> Flags:
    """The flags with one layer for each model chunk; two if layers differ from each other or are recomputed in
    groups."""
    flags = layout.flags
    stages = layout.size("PP") * layout.size("VPP")
    if of.HYBRID in flags:
        return flags.set(of.HYBRID, _pattern(flags.text(of.HYBRID), layout.size("PP"))).without("--num-layers")
    if of.LAYOUT in flags:
        return _stages(flags)
    several = flags.having(("--moe-layer-freq", "--recompute-num-layers", "--window-attn-skip-freq")) or stages == 1
    per_chunk = 2 if several else 1
    given = flags.number("--num-layers", 1)
    extra = len(flags.having(("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")))
    first, last = (min(flags.number(name, 0), size) for name, size in ((of.FIRST, 1), (of.LAST, 2)))
    ends = (first > 0) + (last > 0)
    if ends:
        layers = first + last + (layout.size("PP") - ends) * layout.size("VPP") * per_chunk
        flags = _less(_less(flags, of.FIRST, first), of.LAST, last)
        return flags if layout.size("VPP") > 1 else flags.set("--num-layers", min(layers, given))
    layers = stages * (max(per_chunk, 2) if extra else per_chunk) - extra
    flags = flags.set("--num-layers", min(layers, given) if "--num-layers" in flags else layers)
    if given > layers:
        flags = _less(flags, of.STAGE_LAYERS, per_chunk)
    return flags


def _pattern(text: str, stages: int) -> str:
    """The pattern with one layer of each kind on each stage."""
    given = HybridPattern.read(text)
    kinds = ["".join(dict.fromkeys(stage)) for stage in given.stages]
    predictions = tuple("".join(dict.fromkeys(each)) for each in given.predictions)
    return str(HybridPattern(tuple(kinds) if given.names_stages else (kinds[0] * stages,), predictions))


def _dense_layers(layout: Layout) -> Flags:
    """The flags with only the first layer dense, if a list says which layers have experts."""
    flags = layout.flags
    listed = "[" in layout.flags.text("--moe-layer-freq")
    rest = flags.number("--num-layers", 1) - 1
    return flags.set("--moe-layer-freq", f"([0]*1+[1]*{rest})") if listed else flags


def _stages(flags: Flags) -> Flags:
    """The flags with small stages. A stage with more layers than another keeps more; a stage without layers keeps
    none."""
    stages = stages_of(flags.text(of.LAYOUT))
    counts = sorted({stage.count("t") for stage in stages})
    number = {count: index + (counts[0] > 0) for index, count in enumerate(counts)}
    small = [_stage(stage, number[stage.count("t")]) for stage in stages]
    return flags.set(of.LAYOUT, "|".join(small)).set("--num-layers", sum(stage.count("t") for stage in small))


def _stage(letters: str, layers: int) -> str:
    before, found, after = letters.partition("t")
    return before + "t" * layers + after.replace("t", "") if found else letters


def _heads(layout: Layout) -> Flags:
    """The flags with few heads, but at least two: each tensor-parallel rank, and each context-parallel rank of Ulysses,
    has some."""
    flags = layout.flags
    width = layout.size("TP") * (layout.size("CP") if "a2a" in flags.text("--cp-comm-type") else 1)
    heads = flags.number("--num-attention-heads", 2 * width)
    groups = flags.number("--num-query-groups", 1) if "--group-query-attention" in flags else heads
    small_groups = min(groups, width if width > 1 else 2)
    per_group = min(2, heads // groups) if groups < heads else 1
    small = max(small_groups * per_group, 2 * width if groups == heads and heads >= 2 * width else 0)
    if groups == heads:
        small_groups = small
    hidden = flags.number("--hidden-size", 0)
    channels = flags.number("--kv-channels", hidden // heads if heads else _HEAD)
    # A hidden size that is larger than all heads together stays larger.
    ratio = max(1, hidden // max(1, heads * channels))
    flags = flags.set("--num-attention-heads", small).set("--hidden-size", small * _HEAD * min(ratio, 2))
    if "--kv-channels" in flags or ratio > 1:
        flags = flags.set("--kv-channels", _HEAD)
    flags = _less(flags, "--num-query-groups", small_groups)
    flags = _less(flags, "--ffn-hidden-size", 2 * small * _HEAD * min(ratio, 2))
    for name, size in _MLA.items():
        flags = _less(flags, name, size)
    return flags


def _mamba(layout: Layout) -> Flags:
    """The flags with small heads and states of Mamba, and a group of heads for each tensor- and context-parallel
    rank."""
    flags = layout.flags
    if "M" not in flags.text(of.HYBRID):
        return flags
    groups = layout.size("TP") * layout.size("CP")
    heads = flags.number("--hidden-size", 16) * 2 // _HEAD  # Mamba's layers are twice as wide
    groups = min(groups, heads)
    return flags.with_values(mamba_state_dim=4, mamba_head_dim=_HEAD, mamba_num_groups=groups).without(
        "--mamba-num-heads"
    )


def _experts(layout: Layout) -> Flags:
    """The flags with at least two experts for each expert-parallel rank, and at least twice the experts of a token."""
    flags = layout.flags
    if "--num-experts" not in flags:
        return flags
    topk = min(2, flags.number("--moe-router-topk", 2))
    groups = flags.number("--moe-router-num-groups", 1)
    multiple = math.lcm(layout.size("EP"), groups)
    experts = multiple * math.ceil(max(2 * layout.size("EP"), 2 * topk, 4) / multiple)
    flags = _less(_less(flags, "--num-experts", experts), "--moe-router-topk", topk)
    hidden = flags.number("--hidden-size", 16)
    for name in ("--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size"):
        flags = _less(flags, name, hidden)
    return flags


def _others(layout: Layout) -> Flags:
    """The flags with a short sequence, a small vocabulary and few microbatches: two for each stage, more if chunks need
    more, and at least two."""
    flags = layout.flags
    pp = layout.size("PP")
    dp = layout.size("DP")
    multiple = 2 * layout.size("CP") * layout.size("TP")
    sequence = multiple * math.ceil(_SEQUENCE / multiple)
    flags = _less(flags, "--seq-length", sequence)
    flags = _less(flags, "--max-position-embeddings", flags.number("--seq-length", sequence))
    flags = _less(flags, "--vocab-size", _VOCABULARY).set(of.VOCABULARY, 8)
    size = min(2, flags.number("--micro-batch-size", 1))
    given = flags.number("--global-batch-size", 0) // (flags.number("--micro-batch-size", 1) * dp)
    group = flags.number("--microbatch-group-size-per-virtual-pipeline-stage", pp)
    count = max(2 * pp, 2 * group if layout.size("VPP") > 1 else 0, 2)
    count = min(given, count) if given else count
    return flags.set("--micro-batch-size", size).set("--global-batch-size", size * dp * count)


def _words(before: Flags, after: Flags) -> list[str]:
    """A line for each flag that differs."""
    names = dict.fromkeys(name for name, _ in (*before.items, *after.items))
    texts = [(name, _said(before, name), _said(after, name)) for name in names]
    return [f"{name}: {old} -> {new}" for name, old, new in texts if old != new]


def _said(flags: Flags, name: str) -> str:
    return (flags.text(name) or "on") if name in flags else "-"

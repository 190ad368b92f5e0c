"""The operations, activations and messages of parts of a layer: latent attention, experts, hybrid layers, parallel
groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_pp.errors import PlanError
from megatron_pp.plan.simulate.memory import ModelShape
from megatron_pp.tools.advise.fit import layout_text
from megatron_pp.tools.advise.layers.gpus import ATTENTION, GPUS, LINK, PROCESSORS, Gpu
from megatron_pp.tools.advise.layers.layer_sizes import Latent, Mamba
from megatron_pp.tools.advise.layers.parts import (
    attention,
    gated_delta_net,
    latent_attention,
    mamba,
    moe,
    sparse_attention,
    windowed_attention,
)
from megatron_pp.tools.advise.megatron_args import read_megatron_args, transformer_of
from megatron_pp.tools.advise.model import EMBEDDING
from megatron_pp.tools.advise.transformer import Transformer

FREE = Gpu(1e30, 80, 1e30, 1e12, network=1e11)  # computes in no time
SHAPE = ModelShape(4, 4096, 4096, num_attention_heads=32)
MB = 4096 * 4096 * 2  # one activation

DEEPSEEK = (
    "--num-layers 61 --hidden-size 7168 --seq-length 4096 --ffn-hidden-size 18432 --num-attention-heads 128 --swiglu "
    "--bf16 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    "--v-head-dim 128 --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --vocab-size 129280 "
    "--moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58) --expert-tensor-parallel-size 1 "
)
QWEN = (
    "--num-layers 94 --hidden-size 4096 --seq-length 4096 --num-attention-heads 64 --num-query-groups 4 --swiglu "
    "--bf16 --kv-channels 128 --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1536 --vocab-size 151936 "
)
DENSE = "--hidden-size 1024 --seq-length 4096 --num-attention-heads 8 --bf16 "


def of(text: str) -> Transformer:
    return transformer_of(read_megatron_args(text))


def forward(model: Transformer, gpu: Gpu = FREE, layer: int = 0) -> float:
    return model.model(gpu).layers[layer].forward


@pytest.mark.parametrize(
    ("text", "per_token"),
    [(DEEPSEEK, 961e12 / 3848), (DEEPSEEK + "--mtp-num-layers 1", 1046e12 / 4021), (QWEN, 907e12 / 6131)],
)
def test_operations_are_those_that_megatron_reports(text, per_token):
    """TFLOPS per GPU over tokens per second and GPU, of NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md."""
    assert of(text).flops() / 4096 == pytest.approx(per_token, rel=0.005)


def test_latent_attention_by_hand():
    """Per token: q 7168 x 1536 and 1536 x 128 x 192, kv 7168 x 576 and 512 x 128 x 256, output 128 x 128 x 7168."""
    model = of(DEEPSEEK)
    parts = latent_attention(model)
    parameters = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert sum(part.parameters for part in parts) == parameters
    assert sum(part.flops for part in parts) == 2 * 4096 * parameters
    assert sum(part.core for part in parts) == 4096 * 4096 * 128 * (192 + 128)
    kept = 5 * 7168 / 2 + 2 * (1536 + 576) + 128 * (192 + 192 + 128 + 128)
    assert sum(part.kept for part in parts) == 2 * 4096 * kept


def test_keys_and_values_of_groups_are_kept_once():
    each = Transformer(replace(SHAPE, num_attention_heads=32))
    groups = replace(each, query_groups=4)
    saved = sum(part.kept for part in attention(each)) - sum(part.kept for part in attention(groups))
    assert saved == 2 * MB * (1 - 4 / 32)
    assert sum(part.kept for part in attention(replace(each, kv_channels=256))) > sum(p.kept for p in attention(each))


def test_experts_keep_each_copy_of_a_token():
    model = Transformer(SHAPE, gated=True, experts=64, top_k=6, expert_hidden=1024, expert_parallel=8)
    parts = moe(model)
    more = moe(replace(model, top_k=7))
    assert sum(part.kept for part in more) - sum(part.kept for part in parts) == 2 * 4096 * (4096 + 3 * 1024)
    assert sum(part.experts for part in parts) == 8 * 3 * 4096 * 1024


def test_a_mamba_mixer_by_hand():
    model = Transformer(SHAPE, mamba=Mamba(state_dim=128, head_dim=64, groups=8, heads=64))
    wide, inner = 2 * 4096 + 2 * 8 * 128 + 64, 64 * 64
    assert sum(part.flops for part in mamba(model)) == 2 * 4096 * 4096 * (wide + inner)
    assert sum(part.core for part in mamba(model)) == 7 * 4096 * inner * 128


QWEN_NEXT = (
    "--num-layers 48 --hidden-size 2048 --seq-length 4096 --num-attention-heads 16 --num-query-groups 2 --swiglu "
    "--bf16 --kv-channels 256 --num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 512 --vocab-size 151936 "
    "--moe-shared-expert-intermediate-size 512 --experimental-attention-variant gdn --linear-attention-freq 4 "
)


def test_linear_attention_by_hand():
    """Per token: 2048 into queries, keys (16 x 128), values and gates (32 x 128), two scalars a head, and back."""
    model = of(QWEN_NEXT)
    parts, inner = gated_delta_net(model), 32 * 128
    wide = 2 * 16 * 128 + 2 * inner + 2 * 32
    assert sum(part.parameters for part in parts) == 2048 * (wide + inner)
    assert sum(part.core for part in parts) == 2 * 4096 * (4 * (2 * 2048 + inner) + 32 * 128**2 * 4)
    assert model.mixers == "GGG*" * 12
    parameters = sum(part.parameters + part.experts for letters in model._letters()[0] for part in model.parts(letters))
    assert parameters == pytest.approx(79e9, rel=0.01)  # of the 80B, without its embeddings


def test_sparse_attention_reads_the_keys_that_its_indexer_chooses():
    sizes = "--dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 --dsa-indexer-topk 1024 "
    model = of(DEEPSEEK + sizes + "--experimental-attention-variant dsa")
    assert {*model.mixers} == {"D"}
    scores = 4096 * 4096 * 64 * 128
    chosen = 2 * 4096 * (1024 - 1024**2 / (2 * 4096)) * 128 * (192 + 128)
    assert sum(part.core for part in sparse_attention(model)) == scores + chosen
    more = sum(part.parameters for part in sparse_attention(model)) - sum(p.parameters for p in latent_attention(model))
    assert more == 1536 * 64 * 128 + 7168 * (128 + 64)


def test_attention_windows_reduce_operations():
    text = DENSE + "--num-layers 6 --window-size (127,0)"
    whole, windowed, some = (of(more) for more in (DENSE + "--num-layers 6", text, text + " --window-attn-skip-freq 3"))
    assert (windowed.mixers, some.mixers) == ("w" * 6, "ww*" * 2)
    core = [sum(part.core for part in windowed_attention(model)) for model in (whole, windowed)]
    pairs = sum(min(token + 1, 128) for token in range(4096))
    assert core == [2 * 4096 * 2048 * 2 * 1024, pytest.approx(2 * pairs * 2 * 1024, rel=0.01)]
    assert windowed.flops() < some.flops() < whole.flops()
    hybrid = of("--hybrid-layer-pattern M*- --window-size 127,0 --hidden-size 1024 --seq-length 4096 --bf16")
    assert [one.kind for one in hybrid.model(GPUS["h100"]).layers] == ["mamba", "attention", "feed-forward"]


@pytest.mark.parametrize(
    ("text", "layers"),
    [("([1]*3+[0]*1)*2", (1, 1, 1, 0) * 2), ("[0,1]*4", (0, 1) * 4), ("2", (1, 0) * 4), ("([0]+[1]*7)", (0, *[1] * 7))],
)
def test_experts_of_some_layers(text, layers):
    assert of(f"{DENSE} --num-layers 8 --num-experts 8 --moe-layer-freq {text}").moe_layers == layers


# --- traffic, where computing takes no time


@pytest.mark.parametrize("sequence", [True, False])
def test_tensor_parallel_traffic_is_counted(sequence):
    """Attention and the feed-forward part each have an all-gather and a reduce-scatter, or an all-reduce."""
    shape = replace(SHAPE, tensor_parallel=4, sequence_parallel=sequence)
    layer = Transformer(shape).model(FREE).layers[0]
    assert layer.forward == pytest.approx(1e3 * 2 * 2 * 3 / 4 * MB / (1e12 * LINK))
    assert layer.backward_input == pytest.approx(layer.forward / 2 if sequence else 0.0)
    far = Transformer(shape).model(FREE._replace(domain=2)).layers[0]
    assert far.forward == pytest.approx(10 * layer.forward)


def test_tensor_parallel_traffic_beside_products():
    shape = replace(SHAPE, tensor_parallel=4, sequence_parallel=True)
    slow = FREE._replace(flops=1e14)
    alone, hidden = (forward(replace(Transformer(shape), hides=(False, on)), slow) for on in (False, True))
    assert alone - hidden == pytest.approx(3 / 4 * forward(Transformer(shape)))


def test_keys_and_values_go_around_a_ring():
    """Each of 4 ranks sends keys and values of a quarter of the sequence 3 times."""
    model = Transformer(replace(SHAPE, context_parallel=4), query_groups=8)
    ring = 1e3 * 3 * 2 * MB / 4 * 8 / 32 / (1e12 * LINK)
    assert forward(replace(model, context_comm="all_gather")) == pytest.approx(ring)
    assert forward(model) == pytest.approx(ring, rel=1e-3)  # nothing to run beside
    slow = FREE._replace(flops=1e14)
    core = 1e3 * 4096 / 4 * 4096 * 2 * 4096 / (1e14 * ATTENTION)
    assert core > ring
    assert forward(model, slow) == pytest.approx(forward(replace(model, context_comm="all_gather"), slow) - ring)
    heads = forward(replace(model, context_comm="a2a"))  # queries, keys, values and the output, but a quarter stays
    assert heads == pytest.approx(1e3 * 3 / 4 * (2 + 2 * 8 / 32) * MB / 4 / (1e12 * LINK))


def experts(ranks: int, **more: object) -> Transformer:
    return replace(Transformer(SHAPE, experts=64, top_k=6, expert_hidden=64, expert_parallel=ranks), **more)


def test_tokens_go_to_experts_and_back():
    """Each token is sent in 6 copies, except those that stay on the rank."""
    near = 1e3 * 2 * 6 * 7 / 8 * MB / (1e12 * LINK)
    assert forward(experts(8)) == pytest.approx(near)
    over_network = 1e3 * 2 * 6 * 3 / 4 * MB / (1e11 * LINK)  # of 4 nodes
    assert forward(experts(32)) == pytest.approx(over_network)
    assert forward(experts(32), FREE._replace(domain=72)) == pytest.approx(near * 8 / 7 * 31 / 32)


def test_a_token_is_sent_to_a_node_once():
    nodes = 4 * (1 - (3 / 4) ** 6)
    time = 1e3 * 2 * nodes * 3 / 4 * MB / (1e11 * LINK)
    assert forward(experts(32, once=True)) == pytest.approx(time)
    limited = experts(32, once=True, groups=(4, 8))
    assert forward(limited) == pytest.approx(time * 2 / nodes)


def test_all_to_alls_beside_computation():
    slow = FREE._replace(flops=1e13)
    alone, hidden = (forward(experts(8, hides=(on, False)), slow) for on in (False, True))
    sent = forward(experts(8))
    assert hidden == pytest.approx(alone - sent + sent * PROCESSORS / (1 - PROCESSORS))
    assert forward(experts(8, hides=(True, False))) == pytest.approx(sent)  # nothing to run beside


def test_split_experts_gather_their_tokens():
    shape = replace(SHAPE, tensor_parallel=2, sequence_parallel=True)
    whole, split = (moe(replace(experts(4), shape=shape, expert_split=n)) for n in (1, 2))
    assert sum(part.flops for part in whole) == sum(part.flops for part in split)
    assert sum(part.experts for part in whole) == 2 * sum(part.experts for part in split)
    assert sum(part.tensor for part in split) > sum(part.tensor for part in whole)
    assert [part.tokens for part in whole if part.tokens] == [MB / 2]


# --- recomputation, precision, static memory


@pytest.mark.parametrize("module", ["layernorm", "mla_up_proj", "moe_act", "moe", "shared_experts"])
def test_recomputed_activations_are_not_kept(module):
    none, again = (
        of(DEEPSEEK + text) for text in ("", f"--recompute-granularity selective --recompute-modules {module}")
    )
    before, after = (model.model(GPUS["h100"]).layers[5] for model in (none, again))
    assert after.activation < before.activation
    assert after.backward_input > before.backward_input
    assert (after.forward, after.weight) == (before.forward, before.weight)


def test_products_of_8_bits():
    bf16, fp8 = (of(QWEN + text).model(GPUS["h100"]) for text in ("", "--fp8-format hybrid"))
    assert 0.5 < fp8.layers[5].forward / bf16.layers[5].forward < 1
    assert fp8.layers[-1].forward == bf16.layers[-1].forward  # the output layer has 16
    with pytest.raises(PlanError, match="the GPU has none"):
        of(QWEN + "--fp8-format hybrid").model(GPUS["a100"])


def test_states_of_experts_are_split_over_their_replicas():
    shape = replace(SHAPE, data_parallel=16)
    of_all, of_one = (replace(experts(n), shape=shape).model(FREE).layers[0].static for n in (16, 1))
    held = 64 * 2 * 4096 * 64
    rest = (4 * 4096**2 + 4096 * 64) * (6 + 12 / 16)
    assert of_one * 1e9 - rest == pytest.approx(held * (6 + 12 / 16))
    assert of_all * 1e9 - rest == pytest.approx(held / 16 * (6 + 12))


# --- hybrid models, encoders

HYBRID = "--hybrid-layer-pattern M-M*|MEM-/*E/*E --hidden-size 1024 --seq-length 1024 --num-attention-heads 8 --bf16 "


def test_a_hybrid_model_has_a_layer_for_each_mixer():
    model = of(HYBRID + "--num-experts 8 --vocab-size 32000")
    found = model.model(GPUS["h100"])
    kinds = [one.kind for one in found.layers]
    assert kinds[1:9] == ["mamba", "feed-forward", "mamba", "attention", "mamba", "experts", "mamba", "feed-forward"]
    assert (kinds[9:], found.mtp_pattern) == (["mtp", "mtp", "loss"], "/*E/*E")
    stages = found.layers[:3], found.layers[3:6], found.layers[6:]
    assert layout_text(stages) == "M-|M*M|EM-"
    assert found.layers[9].work > found.layers[4].work + found.layers[6].work


def test_attention_of_a_hybrid_model_may_be_latent():
    model = of("--hybrid-layer-pattern M+ --hidden-size 1024 --seq-length 1024 --num-attention-heads 8 --bf16")
    assert model.latent == Latent(q_rank=0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--hybrid-layer-pattern MXM", "it may have M"),
        ("--hybrid-layer-pattern MM/M/*", "equal parts after /"),
        ("--hybrid-layer-pattern ME", "--num-experts is missing"),
        (QWEN + "--cp-comm-type a2a+p2p", "--cp-comm-type is 'a2a+p2p'"),
        (QWEN + "--recompute-granularity selective --recompute-modules mhc", "--recompute-modules has mhc"),
        (QWEN + "--moe-layer-freq [0]*9*9", "--moe-layer-freq is for 81 layers, but --num-layers is 94"),
        (QWEN + "--moe-layer-freq [0]*999999999", "write it as 2"),
        (QWEN + "--moe-layer-freq [2]*94", "write it as 2"),
        (QWEN + "--moe-layer-freq exit()", "write it as 2"),
        (QWEN + "--window-size 128", "write it as 128,0"),
        (QWEN + "--experimental-attention-variant gdn2", "possible are gdn and dsa"),
        (QWEN + "--experimental-attention-variant gdn", "needs --linear-attention-freq"),
        (QWEN + "--experimental-attention-variant dsa", "needs --multi-latent-attention"),
        (QWEN + "--q-lora-rank x --multi-latent-attention", "--q-lora-rank is 'x'"),
    ],
)
def test_arguments_that_are_not_known(text, words):
    with pytest.raises(PlanError) as error:
        of(text)
    assert words in str(error.value)


def test_an_encoder_is_on_the_first_stage():
    encoder = Transformer(ModelShape(2, 1024, 576), causal=False)
    without, found = (replace(Transformer(SHAPE), encoder=one).model(GPUS["h100"]) for one in (None, encoder))
    alone = encoder.model(GPUS["h100"])
    assert found.layers[0].kind == EMBEDDING
    assert found.layers[0].work == pytest.approx(sum(one.work for one in alone.layers))
    assert found.layers[0].activation == pytest.approx(sum(one.activation for one in alone.layers))
    assert found.flops == without.flops + alone.flops
    assert alone.flops > Transformer(ModelShape(2, 1024, 576)).flops()


@pytest.mark.parametrize("model", [f"--num-layers 1 {DENSE}", DEEPSEEK])
@pytest.mark.parametrize(
    ("text", "bytes_of_each"),
    [
        ("", 0),
        ("--attention-backend unfused", 5),
        ("--attention-backend AttnBackend.unfused", 5),
        ("--transformer-impl local", 5),
        ("--transformer-impl local --use-flash-attn", 0),
        ("--attention-backend unfused --attention-dropout 0.0", 2),
        ("--attention-backend unfused --recompute-granularity selective", 0),
        ("--attention-backend unfused --recompute-granularity selective --recompute-modules mlp", 5),
    ],
)
def test_attention_that_is_not_fused_keeps_a_score_for_each_pair_of_tokens(
    model: str, text: str, bytes_of_each: int
) -> None:
    """There are 5 a s s b bytes for 16-bit scores (arXiv 2205.05198, 4.1): the softmax, its values after dropout, and
    the mask of dropout."""
    found = of(f"{model} {text}")
    (core,) = [part for part in found.parts("*" if found.latent is None else "+") if "core_attn" in part.modules]
    assert core.kept == bytes_of_each * found.heads * 4096 * 4096

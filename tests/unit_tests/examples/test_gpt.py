"""The GPT in stages: a cut model is the whole model, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from examples.gpt.gpt import EMBEDDING, OUTPUT, CausalSelfAttention, GPTStage, RotaryEmbedding, build_gpt_chunks
from examples.gpt.optimizer import sum_tied_gradients
from megatron_pp.config.model_config import TransformerConfig

VOCAB, SEQ, BATCH, LAYERS, HIDDEN = 29, 12, 3, 5, 16

WHOLE = [list(range(LAYERS))]
CUTS = {
    "two": [[0, 1, 2], [3, 4]],
    "each layer": [[0], [1], [2], [3], [4]],
    "bare ends": [[], [0, 1], [2, 3, 4], []],
    "an empty stage inside": [[0, 1], [], [2, 3, 4]],
}


def make_config(**changes: Any) -> TransformerConfig:
    sizes = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": 2}
    settings = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "pipeline_dtype": torch.float32}
    return TransformerConfig(**{**sizes, **settings, **changes})


def make_stages(cut: list[list[int]], config: TransformerConfig | None = None, **changes: Any) -> list[GPTStage]:
    """All stages of a model, in model order, as if one rank held them all."""
    settings = {"vocab_size": VOCAB, "max_sequence_length": SEQ, "seed": 7, **changes}
    return build_gpt_chunks(config or make_config(), stages=range(len(cut)), layers_of_stage=cut, **settings)


def parameters_of(stages: list[GPTStage]) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for stage in stages for name, parameter in stage.named_parameters()}


def gradients_of(stages: list[GPTStage]) -> dict[str, Any]:
    return {name: parameter.grad for name, parameter in parameters_of(stages).items()}


def make_batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1], text[:, 1:]


def train_by_hand(stages: list[GPTStage], recompute: bool = False) -> list[torch.Tensor]:
    """Forward and backward of two batches through all stages as a pipeline does it: detached between stages. Returns
    the losses."""
    losses = []
    for seed in range(2):
        tokens, labels = make_batch(seed)
        inputs: list[torch.Tensor | None] = []
        outputs: list[torch.Tensor] = []
        received = None
        for stage in stages:
            inputs.append(received)
            stage.set_input_tensor([received])
            outputs.append(stage(tokens, labels, recompute=recompute))
            if not stage.post_process:
                check_sent(stage, received, outputs[-1])
            received = outputs[-1].detach().requires_grad_()
        assert (outputs[-1].shape, outputs[-1].dtype) == ((BATCH, SEQ), torch.float32)
        losses.append(outputs[-1].detach())
        gradient = torch.full_like(outputs[-1], 1.0 / outputs[-1].numel())
        for given, output in zip(reversed(inputs), reversed(outputs), strict=True):
            torch.autograd.backward(output, gradient)
            gradient = given.grad if given is not None else None
    sum_tied_gradients(stages, None)
    return losses


def check_sent(stage: GPTStage, received: torch.Tensor | None, sent: torch.Tensor) -> None:
    """In the pipeline's dtype, and neither a view nor the input: the engine frees outputs and keeps inputs."""
    assert (sent.shape, sent.dtype) == ((SEQ, BATCH, HIDDEN), stage.config.pipeline_dtype)
    assert sent._base is None
    assert received is None or sent.data_ptr() != received.data_ptr()


def test_layers_and_seeds_differ() -> None:
    one, other = parameters_of(make_stages(WHOLE)), parameters_of(make_stages(WHOLE, seed=8))
    matrices = [name for name, parameter in one.items() if parameter.dim() == 2]
    assert not any(torch.equal(one[name], other[name]) for name in matrices)
    weights = [one[f"layers.{layer}.attention.qkv.weight"] for layer in range(LAYERS)]
    assert not any(torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_weights_losses_and_gradients_do_not_depend_on_the_cut(
    cut: list[list[int]], tied: bool, recompute: bool
) -> None:
    whole, parts = (make_stages(stages, share_embeddings_and_output_weights=tied) for stages in (WHOLE, cut))
    weights = parameters_of(whole)
    assert parameters_of(parts).keys() == weights.keys()
    assert torch.equal(weights[EMBEDDING], weights[OUTPUT]) == tied
    for one, other in zip(train_by_hand(whole), train_by_hand(parts, recompute), strict=True):
        assert torch.equal(one, other)
    expected = gradients_of(whole)
    for name, gradient in gradients_of(parts).items():
        assert torch.equal(gradient, expected[name]), name
        assert gradient.abs().sum() > 0, name
    assert torch.equal(expected[EMBEDDING], expected[OUTPUT]) == tied


def test_tied_copies_get_the_gradient_of_one_shared_weight() -> None:
    (copies,) = make_stages(WHOLE)
    (shared,) = make_stages(WHOLE, share_embeddings_and_output_weights=False)
    shared.output.weight = shared.embedding.weight
    train_by_hand([copies])
    train_by_hand([shared])
    torch.testing.assert_close(copies.embedding.weight.grad, shared.embedding.weight.grad)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_stages_send_bf16(cut: list[list[int]]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        train_by_hand(make_stages(cut, make_config(pipeline_dtype=torch.bfloat16)))


def test_attention_is_causal_softmax_over_rotated_queries_and_keys() -> None:
    """Against the paper's form: pairs of numbers as complex ones, turned by position times frequency."""
    heads, size = 2, 8
    attention, rotary = CausalSelfAttention(heads * size, heads, 0.0), RotaryEmbedding(size, SEQ)
    x = torch.randn(SEQ, BATCH, heads * size, generator=torch.Generator().manual_seed(5))
    query, key, value = attention.qkv(x).view(SEQ, BATCH, 3, heads, size).unbind(2)

    def turned(vectors: torch.Tensor) -> torch.Tensor:
        frequencies = 10000.0 ** (-torch.arange(size // 2) * 2 / size)
        turn = torch.polar(torch.ones(SEQ, size // 2), torch.arange(SEQ)[:, None] * frequencies)
        return torch.complex(vectors[..., : size // 2], vectors[..., size // 2 :]) * turn[:, None, None]

    scores = torch.einsum("ibhd,jbhd->bhij", turned(query), turned(key).conj()).real / size**0.5
    scores = scores.masked_fill(torch.ones(SEQ, SEQ).triu(1).bool(), float("-inf"))
    expected = torch.einsum("bhij,jbhd->ibhd", scores.softmax(-1), value).flatten(2)
    torch.testing.assert_close(attention(x, rotary), attention.proj(expected), rtol=1e-4, atol=1e-5)


def test_losses_are_those_of_the_logits() -> None:
    (stage,) = make_stages(WHOLE)
    tokens, labels = make_batch()
    logits = stage(tokens)
    assert logits.shape == (BATCH, SEQ, VOCAB)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(stage(tokens, labels), expected.view(BATCH, SEQ))


@pytest.mark.parametrize("kind", ["hidden_dropout", "attention_dropout"])
def test_dropout_follows_from_the_microbatch_and_acts_in_training_only(kind: str) -> None:
    (stage,), (other,) = (make_stages(WHOLE, make_config(**{kind: 0.5}), seed=seed) for seed in (0, 1))
    other.load_state_dict(stage.state_dict())
    batch = make_batch()
    losses = [stage(*batch, microbatch=number).detach() for number in (3, 4, 3)]
    assert losses[2].equal(losses[0])
    assert not losses[1].equal(losses[0])
    assert not other(*batch, microbatch=3).equal(losses[0])
    stage.eval()
    assert stage(*batch, microbatch=3).equal(stage(*batch, microbatch=4))

"""examples/recipes/vlm_in_bubbles.py on ranks: Megatron-core's vision transformer and GPTModel, small."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from examples.recipes import vlm_in_bubbles as recipe
from testkit.megatron import flagged
from testkit.megatron import lab as megatron_lab
from testkit.megatron.cases import Case

PIXELS, IMAGES, TEXT, STEPS, MICROBATCHES = 56, 4, 16, 2, 4
IMAGE_TOKENS = (PIXELS // recipe.PATCH // 2) ** 2


def encoders_in_the_bubbles(case: Case) -> int:
    """Return how many parameters this rank has compared. Losses and gradients of the language model equal those of the
    model without a pipeline to the last bit. Gradients of the encoder, which are summed in parts of the images, are
    equal up to rounding."""
    megatron_lab.set_up_parallel_state(case)
    place = parallel_state.get_pipeline_model_parallel_rank()
    stages = [range(stage * case.tp, (stage + 1) * case.tp) for stage in range(case.pp)]
    model = recipe.VisionLanguageModel([stages], encoder_of(case), language_of(case))
    parts = [slice(k * IMAGES // case.pp, (k + 1) * IMAGES // case.pp) for k in range(case.pp)]
    found = []
    for step in range(STEPS):
        zero(model.chunks)
        reports = model.step([batch_of(step, mb, parts[place]) for mb in range(MICROBATCHES)])
        found.append(([report["loss"] for report in reports], [gradients_of(chunk) for chunk in model.chunks]))
    alone = dataclasses.replace(case, pp=1, dp=case.world // case.tp)
    megatron_lab.set_up_parallel_state(alone)
    whole = [encoder_of(alone), language_of(alone)]
    compared = 0
    for step, (losses, (ours, language)) in enumerate(found):
        expected, (vision, gpt) = in_one_piece(whole, step, parts)
        assert losses in ([], expected)
        for name, grad in language.items():
            assert torch.equal(grad, gpt[name]), name
        for name, grad in ours.items():
            torch.testing.assert_close(grad, vision[name], rtol=1e-4, atol=1e-6)
        assert max(float(grad.abs().max()) for grad in (*ours.values(), *language.values())) > 1e-3
        compared += len(language) + len(ours)
    return compared


def encoder_of(case: Case) -> recipe.Encoder:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        tensor_model_parallel_size=case.tp,
        pipeline_dtype=torch.float32,
    )
    config.variable_seq_lengths = True
    vit = CLIPViTModel(
        config,
        get_vit_layer_with_local_spec(),
        patch_dim=recipe.PATCH,
        img_h=PIXELS,
        img_w=PIXELS,
        add_class_token=False,
        class_token_len=0,
        model_subtype="siglip",
        ln_pre_impl=WrappedTorchNorm,
        ln_post_impl=WrappedTorchNorm,
    )
    torch.manual_seed(7)
    made = recipe.Encoder(vit, config, language_config(case).hidden_size)
    for name, parameter in sorted(made.named_parameters()):
        split = getattr(parameter, "tensor_model_parallel", False)
        torch.manual_seed(sum(map(ord, name)) + split * parallel_state.get_tensor_model_parallel_rank())
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + ("norm" in name and name.endswith("weight")))
    return made


def language_config(case: Case) -> Any:
    config = flagged.config_of(case)
    config.pipeline_model_parallel_size = case.pp
    config.variable_seq_lengths = True
    return config


def language_of(case: Case) -> recipe.Language:
    config = language_config(case)
    gpt = flagged.build_flagged(
        case,
        config,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        vp_stage=None,
        scatter_embedding_sequence_parallel=False,
    )
    megatron_lab.fill_weights(gpt, case.model)
    return recipe.Language(gpt, config)


def batch_of(step: int, mb: int, part: slice) -> recipe.Batch:
    generator = torch.Generator().manual_seed(100 * step + mb)
    images = torch.randn(IMAGES, 3, PIXELS, PIXELS, generator=generator)
    tokens = torch.randint(48, (1, TEXT + 1), generator=generator)
    unlabelled = torch.zeros(1, IMAGES * IMAGE_TOKENS, dtype=torch.long)
    labels = torch.cat([unlabelled, tokens[:, 1:]], dim=1)
    mask = torch.cat([torch.zeros(unlabelled.shape), torch.ones(1, TEXT)], dim=1)
    return recipe.Batch(images[part], tokens[:, :-1], labels, mask)


def in_one_piece(whole: list[Any], step: int, parts: list[slice]) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Return losses and gradients. Images are encoded in ``parts``, since products of other sizes round differently."""
    encoder, language = whole
    zero(whole)
    losses = []
    for mb in range(MICROBATCHES):
        batch = batch_of(step, mb, slice(None))
        encoded = [encoder(batch.images[part])["vision"] for part in parts]
        language.set_input_tensor([{"vision": torch.cat(encoded, dim=1)}])
        output, loss_func = recipe.forward_step(iter([batch]), language)
        loss, report = loss_func(output)
        (loss / MICROBATCHES).backward()
        losses.append(report["loss"])
    return losses, [gradients_of(one) for one in whole]


def zero(chunks: list[Any]) -> None:
    for chunk in chunks:
        chunk.zero_grad()


def gradients_of(chunk: Any) -> dict[str, torch.Tensor]:
    """Return gradients by names of the whole model. Of the language model, only parameters that the loss reaches."""
    if isinstance(chunk, recipe.Language):
        named = megatron_lab.global_names(chunk.gpt, tied=False)
    else:
        named = chunk.named_parameters()
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}

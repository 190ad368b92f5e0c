"""A user's training script around Megatron-LM's pretrain_gpt.py, for parity_faults.py. It uses parts of Megatron-core
that pretrain_gpt.py does not use.

    --label-smoothing X     the script computes the loss from the model's logits, by `vocab_parallel_cross_entropy`
    --gather-logits         the model is built with `parallel_output=False`
    --padding-to-router     tokens that the loss does not count are not counted as load of the experts (`padding_mask`)
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from typing import Any

import pretrain_gpt as gpt
import torch
from megatron.core import tensor_parallel
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--label-smoothing", type=float, default=0.0)
    parser.add_argument("--gather-logits", action="store_true")
    parser.add_argument("--padding-to-router", action="store_true")
    return parser


def smoothed_loss(labels: torch.Tensor, mask: torch.Tensor, output: torch.Tensor) -> Any:
    """The loss with label smoothing. ``output``: logits (microbatch, sequence, vocabulary of this rank)."""
    losses = tensor_parallel.vocab_parallel_cross_entropy(output, labels, get_args().label_smoothing)
    return gpt.loss_func(mask, losses)


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    args = get_args()
    batch = dict(zip(gpt.BATCH_KEYS, gpt.get_batch(data_iterator), strict=True))
    labels, mask = batch["labels"], batch["loss_mask"]
    extra = {"padding_mask": mask == 0} if args.padding_to_router else {}
    smoothed = args.label_smoothing > 0
    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    output = model(*inputs, labels=None if smoothed else labels, loss_mask=mask, **extra)
    return output, partial(smoothed_loss, labels, mask) if smoothed else partial(gpt.loss_func, mask)


if __name__ == "__main__":
    gpt.train_valid_test_datasets_provider.is_distributed = True
    given = parse_and_validate_args(extra_args_provider=add_arguments)
    config = gpt_config_from_args(given)
    config.parallel_output = not given.gather_logits
    pretrain(
        pretrain_cfg_container_from_args(given, config),
        gpt.train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
    )

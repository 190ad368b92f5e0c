"""Made-up data instead of Megatron's data sets. Every layout gets the same global batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_pp.tools.parity.records.parameters import Place


def install(uneven_masks: bool) -> None:
    """Makes Megatron's training loop read from `batches`."""
    from megatron.core.datasets import utils
    from megatron.training import training

    utils.compile_helpers = lambda: None  # helpers of the replaced data sets

    def iterators(provider: Any) -> tuple[Any, None, None]:
        from megatron.core.rerun_state_machine import RerunDataIterator
        from megatron.training import get_args

        args = get_args()
        args.do_train = True
        args.do_valid = False
        args.do_test = False
        place = Place.here()
        found = batches(args, place.rank["DP"], place.size["DP"], uneven_masks)
        chosen = getattr(provider, "func", provider)  # a partial for each model chunk
        if "BERTMaskedWordPieceDataset" in getattr(chosen, "__globals__", {}):
            found = map(for_bert, found)
        return RerunDataIterator(found), None, None

    training.build_train_valid_test_data_iterators = iterators


def batches(args: Any, rank: int, size: int, uneven_masks: bool) -> Iterator[dict[str, torch.Tensor]]:
    """The microbatches of data-parallel rank ``rank`` of ``size``. Microbatch n of this rank has the samples of
    microbatch n x size + rank of a single rank. After a checkpoint, they continue where the checkpoint was saved.
    """
    number = rank + getattr(args, "consumed_train_samples", 0) // args.micro_batch_size
    while True:
        first = number * args.micro_batch_size
        numbers = range(first, first + args.micro_batch_size)
        samples = [
            in_documents(sample(n, args.seq_length, args.vocab_size - 1, uneven_masks), n, args) for n in numbers
        ]
        yield {name: torch.stack([one[name] for one in samples]) for name in samples[0]}
        number += size


def sample(number: int, length: int, vocabulary: int, uneven_masks: bool) -> dict[str, torch.Tensor]:
    """A sample: int64 tokens, labels and positions, and a float32 mask, all of shape (length,). With uneven masks, a
    run of tokens is masked; its place and length depend on the sample's number."""
    generator = torch.Generator().manual_seed(1 + number)
    tokens = torch.randint(vocabulary, (length + 1,), generator=generator)
    mask = torch.ones(length, dtype=torch.float32)
    if uneven_masks:
        masked = int(torch.randint(length // 2, (1,), generator=generator))
        start = int(torch.randint(length - masked, (1,), generator=generator))
        mask[start : start + masked] = 0
    return {
        "tokens": tokens[:-1].clone(),
        "labels": tokens[1:].clone(),
        "loss_mask": mask,
        "position_ids": torch.arange(length),
    }


def in_documents(sample: dict[str, torch.Tensor], number: int, args: Any) -> dict[str, torch.Tensor]:
    """The sample, changed as Megatron's flags for ends of documents say. Two tokens become the last of the vocabulary,
    which ends a document; their places depend on the sample's number. Attention masks are True for hidden tokens.
    """
    length = len(sample["tokens"])
    resets = {
        name: getattr(args, name, False) for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    }
    masked = torch.ones(length, length).triu(1).bool()
    if any(resets.values()):
        places = torch.randperm(length - 1, generator=torch.Generator().manual_seed(-1 - number))[:2].sort().values
        sample["tokens"][places] = args.vocab_size - 1
        sample["labels"][places[places > 0] - 1] = args.vocab_size - 1
        begins = [int(place) + 1 for place in places]
        if resets["eod_mask_loss"]:
            sample["loss_mask"][places] = 0
        for begin in begins if resets["reset_attention_mask"] else ():
            masked[begin:, :begin] = True
        if resets["reset_position_ids"]:
            parts = torch.arange(length).tensor_split(begins)
            sample["position_ids"] = torch.cat([part - part[0] for part in parts])
    if getattr(args, "create_attention_mask_in_dataloader", False):
        sample["attention_mask"] = masked[None]
    return sample


def for_bert(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch with the names of pretrain_bert.py, all int64. It has two segments; their order depends on the
    sample."""
    tokens = batch["tokens"]
    second = torch.arange(tokens.shape[1]) >= tokens.shape[1] // 2
    return {
        "text": tokens,
        "types": second.long().expand_as(tokens).contiguous(),
        "labels": batch["labels"],
        "is_random": tokens[:, 0] % 2,
        "loss_mask": batch["loss_mask"].long(),
        "padding_mask": torch.ones_like(tokens),
    }

"""Flags under Megatron-LM's names, and its checks of sizes."""

import argparse
import os

from megatron.training import ARGS

_SIZES = {"num-layers": 4, "hidden-size": 16, "num-attention-heads": 2, "seq-length": 16, "vocab-size": 32}
_COUNTS = {"micro-batch-size": 1, "train-iters": 4, "eval-interval": 0, "eval-iters": 0, "log-interval": 1}
_COUNTS |= {"save-interval": 0, "lr-decay-iters": 8, "num-workers": 0}
_PARALLEL = {"tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 1}
_TEXTS = {"tokenizer-type": "NullTokenizer", "transformer-impl": "local", "lr-decay-style": "constant"}
_TEXTS |= {"load": "", "save": "", "distributed-backend": "nccl"}
_SWITCHES = ("mock-data", "untie-embeddings-and-output-weights", "moe-router-enable-expert-bias", "reset-position-ids")
_SWITCHES += ("reset-attention-mask", "create-attention-mask-in-dataloader", "eod-mask-loss", "sft")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, value in (_SIZES | _COUNTS | _PARALLEL).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, text in _TEXTS.items():
        parser.add_argument(f"--{name}", default=text)
    for name in ("lr", "min-lr", "attention-dropout", "hidden-dropout", "clip-grad"):
        parser.add_argument(f"--{name}", type=float, default=1.0 if name == "clip-grad" else 0.1)
    for name in ("global-batch-size", "num-experts", "num-virtual-stages-per-pipeline-rank"):
        parser.add_argument(f"--{name}", type=int, default=None)
    parser.add_argument("--make-vocab-size-divisible-by", type=int, default=128)
    parser.add_argument("--position-embedding-type", default="learned_absolute")
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    args = parser.parse_args()
    _check(args)
    ARGS.append(args)
    return args


def _check(args: argparse.Namespace) -> None:
    parallel = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    args.data_parallel_size = int(os.environ["WORLD_SIZE"]) // parallel
    if args.global_batch_size is None:
        args.global_batch_size = args.micro_batch_size * args.data_parallel_size
    assert args.num_layers % args.pipeline_model_parallel_size == 0, "layers should be divisible by the stages"
    per_step = args.micro_batch_size * args.data_parallel_size
    assert args.global_batch_size % per_step == 0, f"global batch size is not divisible by {per_step}"
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    args.consumed_train_samples = 0

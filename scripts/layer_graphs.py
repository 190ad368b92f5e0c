"""CUDA graphs of layers in a training loop of Megatron-core. Fields of its config have the names of its flags."""

from __future__ import annotations

import argparse
from typing import Any

LOCAL, TRANSFORMER_ENGINE = KINDS = ("local", "transformer_engine")


def add_arguments(group: Any) -> None:
    group.add_argument("--fp8-format", choices=("e4m3", "hybrid"), default=None)
    help = "CUDA graphs of layers: Megatron's own, or Transformer Engine's, captured after the first step"
    group.add_argument("--cuda-graph-impl", choices=("none", *KINDS), default="none", help=help)


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    of_engine = args.fp8_format or args.cuda_graph_impl == TRANSFORMER_ENGINE
    if of_engine and args.transformer_impl != "transformer_engine":
        parser.error("--fp8-format and --cuda-graph-impl transformer_engine need --transformer-impl transformer_engine")
    if args.compare and captures(args):
        parser.error("--compare: both engines would capture their graphs into Megatron's one record; run each alone")


def captures(args: argparse.Namespace) -> bool:
    return args.cuda_graph_impl in KINDS


def config_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The config fields of FP8 and CUDA graphs. If one of the two is off, its fields are left out, because older
    releases lack them."""
    fields: dict[str, Any] = {"fp8": args.fp8_format} if args.fp8_format else {}
    if captures(args):
        fields |= {"cuda_graph_impl": args.cuda_graph_impl, "cuda_graph_warmup_steps": 1}
    return fields


def seed_options(args: argparse.Namespace) -> dict[str, bool]:
    """Arguments of ``model_parallel_cuda_manual_seed``. With them graphs draw new random numbers at each replay."""
    return {"use_cudagraphable_rng": True} if captures(args) else {}


def made(args: argparse.Namespace, chunks: list[Any], config: Any, optimizer: Any) -> TransformerEngineGraphs | None:
    """The object that captures Transformer Engine's graphs between steps; None for other kinds of graphs. Megatron
    captures its own graphs within a step."""
    if args.cuda_graph_impl != TRANSFORMER_ENGINE:
        return None
    return TransformerEngineGraphs(args, chunks, config, optimizer)


class TransformerEngineGraphs:
    """Graphs that Transformer Engine captures."""

    def __init__(self, args: argparse.Namespace, chunks: list[Any], config: Any, optimizer: Any) -> None:
        import torch.distributed as dist
        from megatron.core import parallel_state
        from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        sizes = args.global_batch_size, args.micro_batch_size, parallel_state.get_data_parallel_world_size()
        init_num_microbatches_calculator(dist.get_rank(), None, *sizes)
        self.chunks = chunks if args.overlap_param_gather else []  # chunks with hooks that gather parameters
        self.helper = TECudaGraphHelper(chunks, config, args.seq_length, args.micro_batch_size, [optimizer])

    def capture(self) -> None:
        """Capture, as Megatron's training loop does after its first step. Hooks that gather parameters stay outside of
        graphs."""
        if self.helper.graphs_created():
            return
        for chunk in self.chunks:
            chunk.disable_forward_pre_hook(param_sync=False)
        self.helper.create_cudagraphs()
        for chunk in self.chunks:
            chunk.enable_forward_pre_hook()
        if self.chunks:
            self.helper.cuda_graph_set_manual_hooks()

"""Model chunks and data-parallel hooks that write a log of forwards, backwards and calls of hooks.

A line is ``F0.3`` or ``B0.3`` (chunk, microbatch), ``GRAD_SYNC0`` (grad_sync_func) or ``PARAM_SYNC0``
(param_sync_func); ``B`` and ``GRAD_SYNC`` end with a ``+`` if gradients are synchronised, outside no_sync. A log's
``every`` also has lines for entering and leaving no_sync, and for finalize_model_grads_func.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from megatron_pp.runtime.stage import PipelineStage

WIDTH = 2
SHAPE = (1, 1, WIDTH)


class HookLog:
    """The log of one rank, and the hooks that write it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.every: list[str] = []
        self.inside = 0  # number of open no_sync contexts
        self.entered = 0
        self.stages: list[PipelineStage] = []

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.inside += 1
        self.entered += 1
        self.every.append("NO_SYNC")
        try:
            yield
        finally:
            self.inside -= 1
            self.every.append("SYNC")

    def finalize(self, chunks: Any, tokens: Any, **_: Any) -> None:
        self.every.append("FINALIZE")

    def write(self, line: str, marks_sync: bool = False) -> None:
        line += "+" if marks_sync and not self.inside else ""
        self.lines.append(line)
        self.every.append(line)

    def sync_function(self, name: str) -> Callable[[Any], None]:
        """A grad_sync_func or param_sync_func. It finds the chunk by its parameters."""

        def sync(parameters: Any) -> None:
            given = [id(p) for p in parameters]
            chunk = next(c for c, s in enumerate(self.stages) if given == [id(p) for p in s.parameters()])
            self.write(f"{name}{chunk}", marks_sync=name == "GRAD_SYNC")

        return sync

    def make_stages(self, config: Any, chunks: int) -> list[PipelineStage]:
        self.stages = [PipelineStage(_LoggedBlock(self, chunk), config, chunk) for chunk in range(chunks)]
        for stage in self.stages:
            stage.model_type = None  # Megatron reads it
        return self.stages


class _LoggedBlock(torch.nn.Module):
    def __init__(self, log: HookLog, chunk: int) -> None:
        super().__init__()
        self.log = log
        self.chunk = chunk
        self.forwards = 0
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cell = f"{self.chunk}.{self.forwards}"
        self.forwards += 1
        self.log.write(f"F{cell}")
        return _LogBackward.apply(self.linear(x), self.log, f"B{cell}")


class _LogBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, log: HookLog, line: str) -> torch.Tensor:
        ctx.log = log
        ctx.line = line
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.log.write(ctx.line, marks_sync=True)
        return grad, None, None


def logged_config(log: HookLog, chunks: int, explicit: bool = False, param_sync: bool = False, **fields: Any) -> Any:
    """A config with the log's hooks and the fields that Megatron's schedules read."""
    return SimpleNamespace(
        **{
            "pipeline_dtype": torch.float32,
            "hidden_size": WIDTH,
            "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
            "no_sync_func": log.no_sync,
            "grad_sync_func": log.sync_function("GRAD_SYNC") if explicit else None,
            "param_sync_func": log.sync_function("PARAM_SYNC") if param_sync else None,
            "finalize_model_grads_func": log.finalize,
            "defer_embedding_wgrad_compute": False,
            "grad_scale_func": None,
            "timers": None,
            "deallocate_pipeline_outputs": True,
            "overlap_p2p_comm": False,
            "overlap_p2p_comm_warmup_flush": False,
            "batch_p2p_comm": False,
            "variable_seq_lengths": False,
            "sequence_parallel": False,
            "enable_autocast": False,
            "calculate_per_token_loss": False,
            "num_microbatches_with_partial_activation_checkpoints": None,
            "overlap_moe_expert_parallel_comm": False,
            "hybrid_context_parallel": False,
            "fine_grained_activation_offloading": False,
            **fields,
        }
    )


def logged_forward_step(data_iterator: Any, model: Any) -> tuple[Any, Callable[[Any], Any]]:
    return model(torch.ones(SHAPE)), lambda output: (output.sum(), {})


def step_arguments(stages: list[PipelineStage], num_microbatches: int) -> dict[str, Any]:
    """Arguments of a schedule, ours or Megatron's."""
    chunked = len(stages) > 1
    return {
        "forward_step_func": logged_forward_step,
        "data_iterator": [None for _ in stages] if chunked else None,
        "model": stages if chunked else stages[0],
        "num_microbatches": num_microbatches,
        "seq_length": 1,
        "micro_batch_size": 1,
    }

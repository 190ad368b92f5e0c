"""Megatron-core's own schedules, for `engines.make_step`: as released, or with the wait of its merged fix."""

from __future__ import annotations

import importlib
import warnings
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.engines import MakeStage, Step, Unavailable, Work, scheduled_step

_SCHEDULES = ("1f1b", "interleaved_1f1b")


def make(engine: str, work: Work, rank: int, group: Any, make_stage: MakeStage, transport: Any) -> Step:
    schedules, p2p = _import()
    if work.schedule not in _SCHEDULES:
        raise Unavailable(f"Megatron-core has no schedule {work.schedule}")
    chunked = work.num_chunks > 1
    if work.policy == "overlap" and not chunked:
        raise Unavailable("Megatron-core has no overlap without model chunks; compare with plain")
    if engine == "megatron+fix" and work.policy != "overlap":
        raise Unavailable("the fix concerns overlap alone")
    config = _config(work)
    chunks = [_Chunk(make_stage(c * work.pipeline_size + rank), config, c) for c in range(work.num_chunks)]
    solo = _Solo()
    groups = SimpleNamespace(tp=solo, cp=solo, embd=None, pos_embd=None, pp=group or solo, dp_cp=solo)
    arguments: dict[str, Any] = {}
    if work.pipeline_size > 1:
        kind = _waiting(p2p.P2PCommunicator) if engine == "megatron+fix" else p2p.P2PCommunicator
        arguments["p2p_communicator"] = kind(pp_group=group, config=config)
    function = schedules.get_forward_backward_func(work.pipeline_size, work.num_chunks if chunked else None)
    return scheduled_step(work, function, chunks, forward_only=False, pg_collection=groups, **arguments)


def _import() -> tuple[Any, Any]:
    """Megatron-core's modules. Of the CPU's stand-ins for CUDA only those that a schedule itself asks for are put in:
    the whole shim would slow down every `torch.empty`, and be counted as Megatron's overhead.
    """
    if not torch.cuda.is_available() and torch.zeros is not _zeros_on_cpu:
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
        torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign]
        torch.zeros = _zeros_on_cpu  # type: ignore[assignment]  (once a step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
            p2p = importlib.import_module("megatron.core.pipeline_parallel.p2p_communication")
        except ImportError as error:
            raise Unavailable(f"Megatron-core is not importable: {error} (pip install megatron-core)") from error
    return schedules, p2p


_plain_zeros = torch.zeros


def _zeros_on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
    if kwargs.get("device") == "cuda":
        kwargs["device"] = "cpu"
    return _plain_zeros(*args, **kwargs)


def _config(work: Work) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _transformer_config(work)


def _transformer_config(work: Work) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=work.num_stages,
        hidden_size=work.shape[2],
        num_attention_heads=1,
        pipeline_model_parallel_size=work.pipeline_size,
        virtual_pipeline_model_parallel_size=work.num_chunks if work.num_chunks > 1 else None,
        microbatch_group_size_per_vp_stage=work.pipeline_size,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=work.policy == "overlap",
        batch_p2p_comm=work.policy == "batched",
        batch_p2p_sync=False,
        deallocate_pipeline_outputs=True,
    )


class _Chunk(torch.nn.Module):
    """A stage with Megatron's interface."""

    def __init__(self, inner: torch.nn.Module, config: Any, vp_stage: int) -> None:
        super().__init__()
        from megatron.core.enums import ModelType

        self.inner = inner
        self.config = config
        self.vp_stage = vp_stage
        self.model_type = ModelType.encoder_or_decoder
        self.received: torch.Tensor | None = None

    def set_input_tensor(self, tensors: Any) -> None:
        self.__dict__["received"] = tensors[0] if isinstance(tensors, list) else tensors  # as our PipelineStage does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.__dict__
        received, state["received"] = state["received"], None
        return self.inner(x if received is None else received)


class _Solo:
    """A group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class _Done:
    """The handle of a send that was waited for; gloo's own cannot be waited for twice."""

    def wait(self) -> None: ...


def _waiting(kind: Any) -> Any:
    """The communicator with the merged fix's pattern: an activation's send is waited for where it was posted."""

    class Waiting(kind):  # type: ignore[misc]
        def send_forward_recv_forward(self, *args: Any, **kwargs: Any) -> Any:
            result = super().send_forward_recv_forward(*args, **kwargs)
            if kwargs.get("overlap_p2p_comm") and result[1] and "send_next" in result[1]:
                result[1]["send_next"].wait()
                result[1]["send_next"] = _Done()
            return result

    return Waiting

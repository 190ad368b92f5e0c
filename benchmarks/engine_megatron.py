"""Megatron-core's own schedules for `engines.make_step`, of the installed package or of a source checkout. Also our
engine in their place, under `install()`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from benchmarks.megatron_library import Library, load
from benchmarks.work import PLUG_IN, SECONDS, MakeStage, Step, Unavailable, Work, scheduled_step
from megatron_pp.integrations.megatron_core import installed
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.testing.threads import ThreadGroup

_SCHEDULES = ("1f1b", "interleaved_1f1b")


@contextmanager
def _installed() -> Iterator[None]:
    """`installed()` without the warning that ``_is_news`` holds back."""
    logger = logging.getLogger("megatron_pp")
    logger.addFilter(_is_news)
    try:
        with installed():
            yield
    finally:
        logger.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """The benchmark holds Megatron's own functions beside ours, and each `install()` would warn of that."""
    return "was fetched before install()" not in str(record.msg)


def make(engine: str, work: Work, rank: int, group: Any, make_stage: MakeStage, transport: Any) -> Step:
    if work.schedule not in _SCHEDULES:
        raise Unavailable(f"Megatron-core has no schedule {work.schedule}")
    chunked = work.num_chunks > 1
    plugged_in = engine == PLUG_IN
    if work.overlaps and not chunked and not plugged_in:
        raise Unavailable("Megatron-core has no overlap without model chunks; compare with plain")
    library = load(engine)
    _stand_in_for_cuda()
    with library.current():
        config = _config(library, work)
        stages = [make_stage(c * work.pipeline_size + rank) for c in range(work.num_chunks)]
        chunks = [_Chunk(stage, config, c, library) for c, stage in enumerate(stages)]
        arguments: dict[str, Any] = {"pg_collection": _groups(library, group)}
        if plugged_in and transport is not None:
            arguments["p2p_communicator"] = P2PCommunicator(group, config, transport)
        elif work.pipeline_size > 1:
            communicator = library.module("pipeline_parallel.p2p_communication").P2PCommunicator
            arguments["p2p_communicator"] = communicator(pp_group=group, config=config)
        schedules = library.module("pipeline_parallel.schedules")
        with _installed() if plugged_in else nullcontext():
            function = schedules.get_forward_backward_func(work.pipeline_size, work.num_chunks if chunked else None)
    return scheduled_step(work, function, chunks, forward_only=False, **arguments)


def _stand_in_for_cuda() -> None:
    """Replace only the functions of CUDA that a schedule itself calls. The tests' whole shim would slow down every
    `torch.empty`, which would count as Megatron's overhead."""
    if not torch.cuda.is_available() and torch.zeros is not _zeros_on_cpu:
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
        torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign]
        torch.zeros = _zeros_on_cpu  # type: ignore[assignment]  (once a step)


_plain_zeros = torch.zeros


def _zeros_on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
    if kwargs.get("device") == "cuda":
        kwargs["device"] = "cpu"
    return _plain_zeros(*args, **kwargs)


def _groups(library: Library, group: Any) -> Any:
    groups = library.module("process_groups_config").ProcessGroupCollection()
    groups.tp = groups.cp = groups.dp_cp = groups.tp_dp_cp = ThreadGroup(0, 1)
    groups.pp = group or ThreadGroup(0, 1)
    groups.embd = groups.pos_embd = None
    return groups


def _config(library: Library, work: Work) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = library.module("transformer").TransformerConfig(
            num_layers=work.num_stages,
            hidden_size=work.shape[2],
            num_attention_heads=1,
            pipeline_model_parallel_size=work.pipeline_size,
            virtual_pipeline_model_parallel_size=work.virtual_size,
            microbatch_group_size_per_vp_stage=work.pipeline_size,
            pipeline_dtype=torch.float32,
            overlap_p2p_comm=work.overlaps,
            overlap_p2p_comm_warmup_flush=work.policy == "overlap+flush",
            batch_p2p_comm=work.policy == "batched",
            batch_p2p_sync=False,
            deallocate_pipeline_outputs=True,
        )
    config.p2p_timeout = config.compute_timeout = SECONDS  # fields that only our engine reads
    return config


class _Chunk(torch.nn.Module):
    """A stage with Megatron's interface."""

    def __init__(self, inner: torch.nn.Module, config: Any, vp_stage: int, library: Library) -> None:
        super().__init__()
        self.inner, self.config, self.vp_stage = inner, config, vp_stage
        self.model_type = library.module("enums").ModelType.encoder_or_decoder
        self.received: torch.Tensor | None = None

    def set_input_tensor(self, tensors: Any) -> None:
        self.__dict__["received"] = tensors[0] if isinstance(tensors, list) else tensors  # as our PipelineStage does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.__dict__
        received, state["received"] = state["received"], None
        return self.inner(x if received is None else received)

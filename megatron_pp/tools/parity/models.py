"""Compares a user's own model under a schedule of this engine with one process, or with another layout.

def test_my_model():
    microbatches = [(torch.randn(4, 16), torch.randn(4, 16)) for _ in range(8)]
    found = compare(make_model, microbatches, Pipeline(2, 2, pipeline_schedule="zb_v"))
    assert_equal(found)
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from megatron_pp.errors import ScheduleInputError
from megatron_pp.tools.parity.answers.comparison import DIFFERENT, EQUAL, FLOAT64, Comparison, compare_records
from megatron_pp.tools.parity.records.parameters import Place
from megatron_pp.tools.parity.records.recorder import GRADIENT, LOSS, Key, Record, Value
from megatron_pp.tools.parity.workers.processes import run_ranks

_GROUPS = ("TP", "PP", "CP", "DP", "EP", "ETP")
Microbatch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Pipeline:
    """A pipeline of ``pp`` ranks with ``vp`` model chunks each. ``fields`` are fields of the config, such as
    ``pipeline_schedule``. One rank with one chunk runs without a schedule, microbatch by microbatch."""

    def __init__(self, pp: int = 1, vp: int = 1, **fields: Any) -> None:
        self.pp = pp
        self.vp = vp
        self.fields = fields


def compare(
    make_model: Callable[[], nn.Sequential],
    batch: Sequence[Microbatch],
    layout: Pipeline,
    reference: Pipeline | None = None,
    *,
    loss: Loss = nn.functional.mse_loss,
    deadline: float = 120.0,
) -> Comparison:
    """Compares losses and gradients of one step under ``layout`` with those under ``reference``, by default one
    process.

    make_model   makes the whole model, with the same random seed in each process. Its layers are divided among stages
                 in
                 order, as evenly as possible
    batch        (inputs, target) of each microbatch. A run in `float64` separates faults from rounding; it converts
                 `float32` to `float64`
    loss         function of (output of the model, target); returns a scalar. Losses of microbatches are averaged
    deadline     seconds for each run. The ranks of a run are processes that are forked from this process

    Raises RunError if a rank fails, and ScheduleInputError if there are fewer layers than stages.
    """
    reference = Pipeline() if reference is None else reference
    layers = len(make_model())
    stages = max(one.pp * one.vp for one in (layout, reference))
    if layers < stages:
        raise ScheduleInputError(f"{layers} layers cannot be divided into {stages} stages")
    with tempfile.TemporaryDirectory() as folder:

        def run(pipeline: Pipeline, dtype: torch.dtype) -> list[Record]:
            here = Path(tempfile.mkdtemp(dir=folder))

            def body(rank: int) -> Record:
                return _step(make_model, batch, pipeline, loss, dtype, rank)

            return run_ranks(body, pipeline.pp, here, deadline)

        alone, exact = (_whole(run(reference, dtype)) for dtype in (torch.float32, torch.float64))
        found = compare_records(run(layout, torch.float32), alone, exact)
        if found.verdict == EQUAL:
            return found
        precise = compare_records(run(layout, torch.float64), exact, exact, FLOAT64)
        return precise if precise.verdict == DIFFERENT else found


def assert_equal(found: Comparison) -> None:
    """Raises AssertionError if a loss or a gradient is not equal to the last bit. For tests."""
    assert found.verdict == EQUAL, _words(found)


def assert_within_rounding(found: Comparison) -> None:
    """Raises AssertionError if numbers differ by more than sums in another order would. For tests."""
    assert found.verdict != DIFFERENT, _words(found)


def _words(found: Comparison) -> str:
    lines = [f"{one.key.kind} of {one.key.name}: off by {one.error:.3g} on rank {one.rank}" for one in found.wrong()]
    return "\n".join([found.verdict, *found.missing, *lines])


def _step(
    make_model: Callable[[], nn.Sequential],
    batch: Sequence[Microbatch],
    pipeline: Pipeline,
    loss: Loss,
    dtype: torch.dtype,
    rank: int,
) -> Record:
    """Runs one step on this rank. The record has the names of the whole model."""
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    model = make_model().to(dtype)
    data = [(_cast(inputs, dtype), _cast(target, dtype)) for inputs, target in batch]
    alone = pipeline.pp * pipeline.vp == 1
    losses = _without_schedule(model, data, loss) if alone else _with_schedule(model, data, pipeline, loss, dtype)
    place = Place({**dict.fromkeys(_GROUPS, 0), "PP": rank}, {**dict.fromkeys(_GROUPS, 1), "PP": pipeline.pp})
    record = Record(place)
    for number, value in enumerate(losses):
        record.values[Key(0, LOSS, "loss", number)] = Value(np.asarray(value))
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            record.values[Key(0, GRADIENT, name)] = Value(parameter.grad.numpy())
    return record


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _without_schedule(model: nn.Module, batch: Sequence[Microbatch], loss: Loss) -> list[float]:
    losses = []
    for inputs, target in batch:
        value = loss(model(inputs), target)
        (value / len(batch)).backward()
        losses.append(value.item())
    return losses


def _with_schedule(
    model: nn.Sequential, batch: Sequence[Microbatch], pipeline: Pipeline, loss: Loss, dtype: torch.dtype
) -> list[float]:
    import torch.distributed as dist

    from megatron_pp import PipelineStage, get_forward_backward_func, parallel_state, stage_numbers

    chunked = pipeline.vp if pipeline.vp > 1 else None
    dist.init_process_group("gloo")
    schedule = "interleaved_1f1b" if chunked else "1f1b"
    sizes: dict[str, Any] = {
        "pipeline_model_parallel_size": pipeline.pp,
        "virtual_pipeline_model_parallel_size": chunked,
    }
    fields = {"pipeline_dtype": dtype, "variable_seq_lengths": True, "pipeline_schedule": schedule}
    parallel_state.initialize_model_parallel(**sizes)
    config = SimpleNamespace(**sizes | fields | pipeline.fields)
    count = pipeline.pp * pipeline.vp
    numbers = stage_numbers(config.pipeline_schedule, pipeline.pp, pipeline.vp)[dist.get_rank()]
    bounds = [len(model) * stage // count for stage in range(count + 1)]
    chunks = [PipelineStage(model[bounds[k] : bounds[k + 1]], config, stage=k) for k in numbers]

    def forward_step(iterator: Any, chunk: Any) -> tuple[Any, Any]:
        inputs, target = next(iterator)

        def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
            value = loss(output, target)
            return value, {"loss": value.item()}

        return chunk(inputs), loss_func

    iterators = [iter(batch) for _ in chunks]
    reports = get_forward_backward_func(pipeline.pp, chunked)(
        forward_step_func=forward_step,
        data_iterator=iterators if chunked else iterators[0],
        model=chunks if chunked else chunks[0],
        num_microbatches=len(batch),
        seq_length=1,
        micro_batch_size=1,
    )
    dist.barrier()
    return [report["loss"] for report in reports]


def _whole(records: list[Record]) -> Record:
    """The records of all ranks as one, in the order of one process: losses, then gradients."""
    values = {key: value for record in records for key, value in record.values.items()}
    ordered = sorted(values, key=lambda key: (key.kind != LOSS, key.microbatch))
    return Record(records[0].place, values={key: values[key] for key in ordered})

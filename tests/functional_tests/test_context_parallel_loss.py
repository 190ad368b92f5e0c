"""Two pipeline ranks times two context-parallel ranks, with masks that leave the shards of a sequence different numbers
of tokens: the gradients are those of one process with whole sequences, alone and under Megatron-core's schedules.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch
import torch.distributed as dist

from testkit.megatron.cases import Case, Job, Model
from testkit.megatron.runner import run_jobs
from testkit.processes import run_processes
from tests.functional_tests.megatron_support import needs_megatron

LENGTH, HIDDEN, COUNT = 8, 4, 3
# Masks of the microbatches: their shards (two halves) have 4 and 1, 0 and 2, and no tokens that count.
# The modules with parallel_state, with TransformerConfig, and with the schedules.
PACKAGES = {
    "alone": ("megatron_pp", "megatron_pp.config.model_config", "megatron_pp"),
    "megatron": ("megatron.core", "megatron.core.transformer", "megatron.core.pipeline_parallel"),
}
MASKS = [[1, 1, 1, 1, 0, 0, 1, 0], [0, 0, 0, 0, 1, 0, 0, 1], [0] * LENGTH]


class Stage(torch.nn.Module):
    """A linear layer; each token is computed without the others."""

    def __init__(self, config: Any, stage: int) -> None:
        super().__init__()
        self.config = config
        self.layer = torch.nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        for parameter in self.layer.parameters():
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(stage))
        self.given: Any = None

    def set_input_tensor(self, given: Any) -> None:
        self.given = given[0] if isinstance(given, list) else given

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x if self.given is None else self.given))


def microbatches(shard: slice) -> Any:
    """Yield each microbatch as (input [tokens of the shard, 1, HIDDEN], mask [tokens of the shard])."""
    generator = torch.Generator().manual_seed(7)
    for mask in MASKS:
        x = torch.randn(LENGTH, 1, HIDDEN, generator=generator, dtype=torch.float64)
        yield x[shard], torch.tensor(mask)[shard]


def forward_step(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
    x, mask = next(data)

    def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        loss = (output.sum(dim=(1, 2)) * mask).sum()
        return loss, mask.sum().int(), {"loss": loss.detach()}

    return model(x), loss_func


def gradients(model: Stage) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters()]


def one_process() -> list[list[torch.Tensor]]:
    stages = [Stage(None, stage) for stage in range(2)]
    for x, mask in microbatches(slice(None)):
        output = stages[1](stages[0](x))
        ((output.sum(dim=(1, 2)) * mask).sum() / mask.sum().clamp(min=1) / COUNT).backward()
    return [gradients(stage) for stage in stages]


def step_of(host: str) -> tuple[int, list[torch.Tensor]]:
    """Take one step, and return (stage, gradients after the data-parallel reduction) of this rank."""
    package, classes, schedules = PACKAGES[host]
    state = importlib.import_module(f"{package}.parallel_state")
    grid = {"pipeline_model_parallel_size": 2, "context_parallel_size": 2}
    sizes = {"num_layers": 2, "num_attention_heads": 1, "hidden_size": HIDDEN}
    config = importlib.import_module(classes).TransformerConfig(**sizes, **grid, pipeline_dtype=torch.float64)
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel(**grid)
    stage, context = state.get_pipeline_model_parallel_rank(), state.get_context_parallel_rank()
    model, half = Stage(config, stage), LENGTH // 2
    importlib.import_module(schedules).get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=microbatches(slice(context * half, (context + 1) * half)),
        model=model,
        num_microbatches=COUNT,
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=False,
    )
    for grad in gradients(model):
        dist.all_reduce(grad, group=state.get_context_parallel_group())
        grad /= 2
    return stage, gradients(model)


def steps_of(host: str, *installs: dict[str, Any]) -> list[tuple[float, int]]:
    """Take one step after each `install`. Return for each step the largest difference of a gradient on this rank from
    that of one process, and the number of warnings so far."""
    expected, found, warnings = one_process(), [], []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_pp").addHandler(handler)
    for settings in installs or [None]:
        if settings is not None:
            importlib.import_module("megatron_pp.integrations.megatron_core").install(**settings)
        stage, grads = step_of(host)
        apart = max(float((grad - wanted).abs().max()) for grad, wanted in zip(grads, expected[stage], strict=True))
        found.append((apart, sum("#7513" in line for line in warnings)))
    return found


def alone(rank: int, size: int) -> list[tuple[float, int]]:
    return steps_of("alone")


def under_megatron(case: Case) -> list[tuple[float, int]]:
    return steps_of("megatron", {}, {}, {"whole_sequence_loss": True})


def test_uneven_masks_leave_the_gradients_of_whole_sequences() -> None:
    for [(apart, warned)] in run_processes(alone, 4, timeout=240.0, start_method="forkserver"):
        assert apart < 1e-12
        assert warned == 0


@needs_megatron
def test_megatrons_numbers_are_kept_with_one_warning_unless_a_setting_corrects_them() -> None:
    job = Job(Case(Model(layers=2), pp=2, cp=2), check=f"{__name__}:under_megatron", deadline=240.0)
    (outcome,) = run_jobs([job])
    assert outcome.status == "ok", outcome.message
    kept, kept_again, corrected = (max(apart for apart, _ in ranks) for ranks in zip(*outcome.facts, strict=True))
    warned, warned_again, _ = (sum(count for _, count in ranks) for ranks in zip(*outcome.facts, strict=True))
    assert kept == kept_again > 1e-3, "Megatron counts whole sequences now: the setting and its warning can go"
    assert warned == warned_again == 2, "one on each rank of the last stage"
    assert corrected < 1e-12

"""Steps that fail on a rank, by the part of the library that runs them; for ``test_nothing_kept_of_failures.py``.

Each ``of_...`` makes a model, takes steps up to the one that fails, and returns this rank's error as text. All that it
made is freed when it returns.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_pp import PipelineStage, SplitOutputLayer
from megatron_pp.config.model_config import ModelParallelConfig
from megatron_pp.features.modules.graph import Module
from megatron_pp.features.modules.modules_step import ModulesPipeline, forward_backward_modules
from megatron_pp.integrations.torch_pipelining import PlanSchedule
from megatron_pp.plan.builder import stage_numbers
from megatron_pp.plan.orders import find_family
from megatron_pp.schedules import get_forward_backward_func
from megatron_pp.testing.toy import HIDDEN, ToyData, toy_config
from megatron_pp.weight_grad import split_weight_grad
from testkit.faults.fault_injection import DELAY, Fault, FaultyBlock, Trigger
from testkit.thread_runs.step_runs import Rank

SIZE, MICROBATCHES, STEPS = 2, 4, 4  # one step more than that of the fault, for a rank that had finished before it
TOKENS = 20_000  # tokens of a microbatch whose messages have their own connections
VOCABULARY = 11
ONE_CHUNK = ("1f1b", "zb_h1", "seq_1f1b", "gpipe", "vocab_1f1b", "vocab_1f1b_alg1")


class Trial(NamedTuple):
    """One rank of a step that fails.

    rank              rank in the pipeline
    fault             the fault, on one rank of the pipeline
    group             the process group of the pipeline
    communicator_of   makes a communicator on ``group`` for a config
    shards            the mesh over which FSDP2 shards the stages, or None
    seen              collects the memory of all inputs and outputs of stages
    """

    rank: int
    fault: Fault
    group: Any
    communicator_of: Callable[[Any], Any]
    shards: DeviceMesh | None
    seen: list[StorageWeakRef]

    def trigger(self) -> Trigger:
        return Trigger(self.fault if self.fault.rank == self.rank else None, lambda: None)

    def timeouts(self) -> dict[str, Any]:
        """Return the config's timeouts, which are short if the fault is an operation that takes too long."""
        slow = self.fault.kind == DELAY
        return {"p2p_timeout": 2.0 if slow else 20.0, "compute_timeout": 3.0 if slow else None}

    def config(self, **fields: Any) -> Any:
        return toy_config(**self.timeouts(), **fields)

    def shard(self, module: torch.nn.Module) -> None:
        if self.shards is not None:
            fully_shard(module, mesh=self.shards)


class WatchedBlock(FaultyBlock):
    """A stage that appends the memory of its inputs and outputs to ``seen``, and accepts named tensors."""

    def __init__(self, stage: int, chunk: int, trigger: Trigger, seen: list[StorageWeakRef]) -> None:
        super().__init__(stage, chunk, trigger)
        self.seen, self.stage = seen, stage

    def forward(self, x: torch.Tensor, **named: torch.Tensor) -> Any:
        y = super().forward(x + sum(named.values()) if named else x)
        self.seen += [StorageWeakRef(one.untyped_storage()) for one in (x, y)]
        return y


class MakingBlock(WatchedBlock):
    """The first stage also sends a named tensor, ``a``, to the last one."""

    def forward(self, x: torch.Tensor, **named: torch.Tensor) -> Any:
        y = super().forward(x, **named)
        return (y, {"a": y * 2}) if self.stage == 0 else y


def chunks_of(schedule: str) -> int:
    """Return the number of chunks of a rank under ``schedule`` in these tests."""
    family = find_family(schedule)
    return 1 if family.name in ONE_CHUNK else family.chunks or 2


def error_of(run: Callable[[], Any], trigger: Trigger, blocks: list[WatchedBlock]) -> str:
    """Call ``run``, which takes a step, ``STEPS`` times, and return the error as text, or "no error"."""
    try:
        for step in range(1, STEPS + 1):
            trigger.step = step
            for block in blocks:
                block.begin_step()
            run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def of_the_library(trial: Trial, *, tokens: int = 4, splits: bool = False, makes: bool = False, **fields: Any) -> str:
    """Run the library's own steps. ``tokens``: tokens of a microbatch; ``splits``: split backwards; ``makes``: the
    first stage makes a named tensor; ``fields``: fields of the config."""
    chunks = chunks_of(fields.get("pipeline_schedule", "1f1b"))
    with tempfile.TemporaryDirectory() as folder:
        if "trace_dir" in fields:
            fields["trace_dir"] = folder
        config = trial.config(virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None, **fields)
        data = ToyData(MICROBATCHES, seq_length=tokens, variable=fields.get("variable_seq_lengths", False))
        one = Rank(trial.rank, config, trial.communicator_of(config), chunks, data)
        trigger, made = trial.trigger(), iter(range(chunks))
        kind = MakingBlock if makes else WatchedBlock
        model = one.model(lambda stage: kind(stage, next(made), trigger, trial.seen))
        if splits:
            split_weight_grad(model)
        for chunk in model:
            trial.shard(chunk.inner)
        return error_of(lambda: one.step(model), trigger, [chunk.inner for chunk in model])


class OutputStage(torch.nn.Module):
    """A watched stage, followed by this rank's rows of the output layer."""

    def __init__(self, rank: int, trigger: Trigger, seen: list[StorageWeakRef]) -> None:
        super().__init__()
        self.block = WatchedBlock(rank, 0, trigger, seen)
        self.output = SplitOutputLayer(HIDDEN, VOCABULARY, rank, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.block(x)
        return y


def of_a_split_output_layer(trial: Trial, schedule: str) -> str:
    config, trigger, data = trial.config(pipeline_schedule=schedule), trial.trigger(), ToyData(MICROBATCHES)
    stage = PipelineStage(OutputStage(trial.rank, trigger, trial.seen), config)
    communicator = trial.communicator_of(config)

    def loss_of(losses: torch.Tensor) -> Any:
        trial.seen.append(StorageWeakRef(losses.untyped_storage()))
        return losses.mean(), {"loss": float(losses.detach().mean())}

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        x, target = next(iterator)
        labels = target[..., 0].abs().mul(10).long() % VOCABULARY
        return model.inner.output(model(x), labels), loss_of

    def run() -> None:
        get_forward_backward_func(SIZE)(
            forward_step_func=forward_step,
            data_iterator=data.iterator(),
            model=stage,
            num_microbatches=MICROBATCHES,
            seq_length=data.seq_length,
            micro_batch_size=data.micro_batch_size,
            p2p_communicator=communicator,
        )

    return error_of(run, trigger, [stage.inner.block])


class ModulesModel(torch.nn.Module):
    """The stages of one chunk of a rank, in a pipeline of several modules."""

    def __init__(self, stages: dict[str, WatchedBlock], config: Any) -> None:
        super().__init__()
        self.stages = torch.nn.ModuleDict(stages)
        self.config = config
        self.given: dict[str, Any] = {}

    def set_input_tensor(self, tensors: list[dict[str, Any]]) -> None:
        (self.given,) = tensors

    def forward(self, data: torch.Tensor) -> dict[str, torch.Tensor]:
        given = [one[0] if isinstance(one, list) else one for one in self.given.values()]
        self.given = {}
        x = torch.cat(given) if given else data
        return {name: stage(x) for name, stage in self.stages.items()}


def of_several_modules(trial: Trial, modules: tuple[Module, ...]) -> str:
    """Run steps of an encoder whose output goes to a language model."""
    pipeline = ModulesPipeline(modules, {"vision": ["llm"]})
    config, trigger, data = trial.config(variable_seq_lengths=True), trial.trigger(), ToyData(MICROBATCHES)
    here = [one for one in modules if any(trial.rank in ranks for stages in one.ranks for ranks in stages)]
    chunks: dict[int, dict[str, WatchedBlock]] = {one.chunk: {} for one in sorted(here, key=lambda one: one.chunk)}
    for k, one in enumerate(here):
        chunks[one.chunk][one.name] = WatchedBlock(k, list(chunks).index(one.chunk), trigger, trial.seen)
    models = [ModulesModel(stages, config) for stages in chunks.values()]

    def loss_of(output: dict[str, torch.Tensor]) -> Any:
        loss = output["llm"].square().mean()
        return loss, {"loss": loss.detach()}

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        return model(next(iterator)[0]), loss_of

    def run() -> None:
        iterators = [data.iterator() for _ in models]
        forward_backward_modules(
            pipeline,
            forward_step_func=forward_step,
            data_iterator=iterators if len(models) > 1 else iterators[0],
            model=models if len(models) > 1 else models[0],
            num_microbatches=MICROBATCHES,
        )

    return error_of(run, trigger, [block for stages in chunks.values() for block in stages.values()])


def of_torchs_stages(trial: Trial, schedule: str) -> str:
    trigger, chunks = trial.trigger(), chunks_of(schedule)
    blocks = [
        WatchedBlock(stage, chunk, trigger, trial.seen)
        for chunk, stage in enumerate(stage_numbers(schedule, SIZE, chunks)[trial.rank])
    ]
    for block in blocks:
        trial.shard(block)
    count, cpu = SIZE * chunks, torch.device("cpu")
    stages = [TorchStage(block, block.stage, count, cpu, group=trial.group) for block in blocks]
    config = ModelParallelConfig(overlap_p2p_comm=True, **trial.timeouts())
    plan = PlanSchedule(stages, MICROBATCHES, torch.nn.functional.mse_loss, schedule=schedule, config=config)
    batch = torch.ones(MICROBATCHES * 2, HIDDEN)
    first = (batch,) if any(stage.is_first for stage in stages) else ()
    target = batch if any(stage.is_last for stage in stages) else None
    return error_of(lambda: plan.step(*first, target=target), trigger, blocks)

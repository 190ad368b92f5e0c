"""Toy modules on grids of ranks: the stages of each rank, and a reference that runs all stages of all replicas in one
process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_pp.features.modules.graph import Module
from megatron_pp.testing.toy import toy_config

HIDDEN = 4
_BATCH = 12  # all replicas of a module together
Topology = Mapping[str, Sequence[str]]
Place = tuple[str, int, int]  # module, replica, stage


@dataclass(frozen=True)
class Setup:
    """Modules, the modules to which their outputs go, and microbatches. A module without inputs reads data. ``uneven``:
    each replica has another number of samples, which also differs between microbatches."""

    modules: tuple[Module, ...]
    topology: Topology
    microbatches: int = 4
    forward_only: bool = False
    steps: int = 2
    config: Mapping[str, Any] = field(default_factory=dict)
    uneven: bool = False

    def sources(self, name: str) -> list[str]:
        return [one.name for one in self.modules if name in self.topology.get(one.name, ())]

    def data(self, step: int, module: Module, mb: int) -> list[Tensor]:
        """The input of a module by replica, [sequence, batch, hidden]. Sequence lengths of modules differ."""
        number = self.modules.index(module)
        generator = torch.Generator().manual_seed(1000 * step + 100 * number + mb)
        whole = torch.randn(3 + 2 * number, _BATCH, HIDDEN, generator=generator)
        count = len(module.ranks)
        if not self.uneven:
            return list(whole.tensor_split(count, dim=1))
        sizes = [1 + (mb + replica) % 3 for replica in range(count - 1)]
        return list(whole.split([*sizes, _BATCH - sum(sizes)], dim=1))


class Stage(torch.nn.Module):
    """A stage of a module. Its weights are the same on all replicas."""

    def __init__(self, module: Module, number: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)
        generator = torch.Generator().manual_seed(sum(map(ord, module.name)) + number)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def gradients_of(stage: torch.nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in stage.parameters()]


def loss_of(output: Tensor) -> tuple[Tensor, dict[str, float]]:
    loss = output.square().mean()
    return loss, {"loss": loss.item()}


class RankModel(torch.nn.Module):
    """The stages of one rank, or of one of its chunks."""

    def __init__(self, setup: Setup, rank: int, chunk: int | None = None) -> None:
        super().__init__()
        self.setup = setup
        places = {place[0]: place for place in places_of(setup, rank)}
        self.places = {name: at for name, at in places.items() if chunk in (None, _named(setup, name).chunk)}
        self.stages = torch.nn.ModuleDict(
            {name: Stage(_named(setup, name), stage) for name, (_, _, stage) in self.places.items()}
        )
        self.given: dict[str, Any] = {}
        self.config: Any = None

    def set_input_tensor(self, tensors: list[dict[str, Any]]) -> None:
        (self.given,) = tensors

    def forward(self, data: Mapping[str, Tensor]) -> dict[str, Tensor]:
        made = {}
        for name, stage in self.stages.items():
            sources = self.setup.sources(name)
            if self.places[name][2] > 0:
                before = self.given[name]
                x = before[0] if isinstance(before, list) else before
            elif sources:
                x = torch.cat([self.given[source] for source in sources])
            else:
                x = data[name]
            made[name] = stage(x)
        return made

    def batches(self, step: int) -> Iterator[dict[str, Tensor]]:
        for mb in range(self.setup.microbatches):
            yield {
                name: self.setup.data(step, _named(self.setup, name), mb)[replica]
                for name, (_, replica, _) in self.places.items()
            }

    def gradients(self) -> dict[Place, list[Tensor | None]]:
        return {place: gradients_of(self.stages[name]) for name, place in self.places.items()}


class RankChunks:
    """The model of one rank, or its models, one for each chunk."""

    def __init__(self, setup: Setup, rank: int) -> None:
        numbers = sorted({_named(setup, name).chunk for name, _, _ in places_of(setup, rank)})
        self.models = [RankModel(setup, rank, number) for number in numbers]
        for model in self.models:
            model.config = config_of(setup)

    def arguments(self, step: int) -> dict[str, Any]:
        """The schedule's arguments ``model``, with cleared gradients, and ``data_iterator``."""
        for model in self.models:
            model.zero_grad()
        if len(self.models) == 1:
            return {"model": self.models[0], "data_iterator": self.models[0].batches(step)}
        return {"model": self.models, "data_iterator": [model.batches(step) for model in self.models]}

    def gradients(self) -> dict[Place, list[Tensor | None]]:
        return {place: own for model in self.models for place, own in model.gradients().items()}


def forward_step(sink: str | None) -> Any:
    """A ``forward_step_func``. ``sink``: the module whose output gives the loss."""

    def step(batches: Iterator[dict[str, Tensor]], model: RankModel) -> tuple[Any, Any]:
        return model(next(batches)), lambda output: loss_of(output[sink])

    return step


def config_of(setup: Setup) -> Any:
    return toy_config(variable_seq_lengths=True, **setup.config)


def sink_of(setup: Setup) -> str:
    (name,) = (module.name for module in setup.modules if not setup.topology.get(module.name))
    return name


def places_of(setup: Setup, rank: int) -> list[Place]:
    return [
        (module.name, replica, stage)
        for module in setup.modules
        for replica, stages in enumerate(module.ranks)
        for stage, ranks in enumerate(stages)
        if rank in ranks
    ]


def _named(setup: Setup, name: str) -> Module:
    return next(module for module in setup.modules if module.name == name)


@dataclass
class Reference:
    """The result of one process. ``losses``: by replica of the last module, in the order of microbatches."""

    losses: list[list[float]]
    gradients: dict[Place, list[Tensor | None]]


def in_one_process(setup: Setup) -> list[Reference]:
    """Run every step in one process: the stages of all replicas, connected by cat and chunk, microbatch by
    microbatch."""
    stages = {
        (module.name, replica, k): Stage(module, k)
        for module in setup.modules
        for replica in range(len(module.ranks))
        for k in range(module.stages)
    }
    return [_reference_step(setup, stages, step) for step in range(setup.steps)]


def _reference_step(setup: Setup, stages: Mapping[Place, Stage], step: int) -> Reference:
    sink = sink_of(setup)
    losses: list[list[float]] = [[] for _ in _named(setup, sink).ranks]
    for stage in stages.values():
        stage.zero_grad()
    for mb in range(setup.microbatches):
        with torch.set_grad_enabled(not setup.forward_only):
            made: dict[str, list[Tensor]] = {}
            for module in setup.modules:  # in the order of the topology
                xs = _inputs(setup, module, made) or setup.data(step, module, mb)
                for k in range(module.stages):
                    xs = [stages[(module.name, replica, k)](x) for replica, x in enumerate(xs)]
                made[module.name] = xs
            for replica, output in enumerate(made[sink]):
                losses[replica].append(loss_of(output)[1]["loss"])
            total = sum(loss_of(output)[0] / setup.microbatches for output in made[sink])
        if not setup.forward_only:
            total.backward()
    return Reference(losses, {place: gradients_of(stage) for place, stage in stages.items()})


def _inputs(setup: Setup, module: Module, made: Mapping[str, list[Tensor]]) -> list[Tensor]:
    """The inputs of a module by replica; empty if no module's output goes to it."""
    parts = [_across(made[source], len(module.ranks)) for source in setup.sources(module.name)]
    return [torch.cat(of_replica) for of_replica in zip(*parts, strict=True)]


def _across(outputs: list[Tensor], count: int) -> list[Tensor]:
    """The replicas' outputs, distributed to ``count`` replicas: each gets a part of one output, or several
    concatenated."""
    if count >= len(outputs):
        return [part for output in outputs for part in output.tensor_split(count // len(outputs), dim=1)]
    several = len(outputs) // count
    return [torch.cat(outputs[k : k + several], dim=1) for k in range(0, len(outputs), several)]

"""Rows of pipelines of several modules: losses and gradients of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megatron_pp.features.modules.modules_step import ModulesPipeline, forward_backward_modules
from megatron_pp.runtime.communicators import close_communicators
from testkit.models.module_grids import module_on
from testkit.models.module_models import Place as ModulePlace
from testkit.models.module_models import RankChunks, Reference, Setup, forward_step, in_one_process, places_of, sink_of
from tests.functional_tests.numbers.rows import Numbers, Place, Row, differences

RANKS = 6
"""Ranks of the job. In most rows some of them are in no module; they take no steps."""

SETUPS = {
    "an encoder": Setup((module_on("vision"), module_on("llm", 1)), {"vision": ["llm"]}),
    "two encoders on one rank": Setup(
        (module_on("vision"), module_on("audio"), module_on("llm", 1)), {"vision": ["llm"], "audio": ["llm"]}
    ),
    "pipelines of unequal length": Setup(
        (module_on("vision", pp=2), module_on("audio", 2), module_on("llm", 3, pp=2)),
        {"vision": ["llm"], "audio": ["llm"]},
        microbatches=5,
    ),
    "fan-in": Setup((module_on("vision", dp=2), module_on("llm", 2, pp=2)), {"vision": ["llm"]}),
    "fan-out": Setup((module_on("vision"), module_on("llm", 1, pp=1, dp=3)), {"vision": ["llm"]}),
    "replicas apart, tensor-parallel": Setup(
        (module_on("vision", dp=2, tp=2), module_on("llm", 4, dp=1, tp=2)), {"vision": ["llm"]}, microbatches=2
    ),
    "one output for two modules": Setup(
        (module_on("vision"), module_on("llm", 1), module_on("images", 2, dp=2)),
        {"vision": ["llm", "images"], "llm": ["images"]},
    ),
    "an encoder in the bubbles": Setup(
        (module_on("vision", dp=2), module_on("llm", pp=2)._replace(chunk=1)), {"vision": ["llm"]}
    ),
    "encoders of two chunks, on few ranks": Setup(
        (
            module_on("vision", 1, pp=2),
            module_on("audio", 2)._replace(chunk=1),
            module_on("llm", pp=3)._replace(chunk=2),
        ),
        {"vision": ["llm"], "audio": ["llm"]},
        microbatches=5,
    ),
    # A gradient goes from rank to rank as an activation does.
    "an encoder's replicas on a tensor-parallel stage": Setup(
        (module_on("vision", dp=4)._replace(times=(4.0, 8.0)), module_on("llm", tp=4)._replace(chunk=1)),
        {"vision": ["llm"]},
        microbatches=3,
    ),
    "an encoder's replicas on the first of two tensor-parallel stages": Setup(
        (module_on("vision", dp=2), module_on("llm", pp=2, tp=2)._replace(chunk=1)), {"vision": ["llm"]}, microbatches=1
    ),
    "fan-in of unequal batches": Setup(
        (module_on("vision", dp=4), module_on("llm", 4, dp=2, pp=1)), {"vision": ["llm"]}, uneven=True
    ),
    "unequal batches of encoders in the bubbles": Setup(
        (module_on("vision", dp=2), module_on("llm", pp=2)._replace(chunk=1)), {"vision": ["llm"]}, uneven=True
    ),
    "fan-out of a batch that cannot be cut equally": Setup(
        (module_on("vision"), module_on("llm", 1, dp=5)), {"vision": ["llm"]}
    ),
    "one output for two modules of a rank": Setup(
        (module_on("vision"), module_on("left", 1), module_on("right", 1), module_on("llm", 2)),
        {"vision": ["left", "right"], "left": ["llm"], "right": ["llm"]},
    ),
    "one output for two modules of a rank, from several replicas": Setup(
        (module_on("vision", dp=2), module_on("left", 2), module_on("right", 2), module_on("llm", 3)),
        {"vision": ["left", "right"], "left": ["llm"], "right": ["llm"]},
        uneven=True,
    ),
    "equal replicas": Setup((module_on("vision", dp=2), module_on("llm", 2, dp=2)), {"vision": ["llm"]}),
}
SETUPS |= {
    "evaluation": replace(SETUPS["fan-in"], forward_only=True),
    "outputs kept": replace(SETUPS["fan-in"], config={"deallocate_pipeline_outputs": False}),
}


Steps = list[tuple[list[float], Mapping[ModulePlace, list[Tensor | None]]]]
"""Losses and gradients of each step on one rank."""


@dataclass(frozen=True)
class SeveralModules:
    setup: Setup

    def run(self, place: Place) -> Numbers:
        """Return the numbers of the modules on this rank."""
        pipeline = ModulesPipeline(self.setup.modules, self.setup.topology)  # by all ranks of the job
        if pipeline.graph is None:
            return {}
        try:
            return numbers_of(self.setup, place.rank, steps_of(self.setup, pipeline, place.rank))
        finally:
            close_communicators()

    def expected(self, place: Place) -> Numbers:
        return one_process(self.setup, in_one_process(self.setup))


def steps_of(setup: Setup, pipeline: ModulesPipeline, rank: int, **more: Any) -> Steps:
    """Take the steps of this rank, and return them. ``more``: arguments of the schedule function."""
    chunks = RankChunks(setup, rank)
    found = []
    for step in range(setup.steps):
        reports = forward_backward_modules(
            pipeline,
            forward_step_func=forward_step(sink_of(setup)),
            num_microbatches=setup.microbatches,
            forward_only=setup.forward_only,
            **chunks.arguments(step),
            **more,
        )
        found.append(([report["loss"] for report in reports], chunks.gradients()))
    return found


def numbers_of(setup: Setup, rank: int, steps: Steps) -> Numbers:
    """Return losses and gradients by name, and assert that no gradient is 0. Losses are those of the replica of the
    last module to which the rank belongs."""
    sink = next(module for module in setup.modules if module.name == sink_of(setup))
    last = [replica for replica, stages in enumerate(sink.ranks) if rank in stages[-1]]
    numbers: dict[str, Tensor | float | None] = {}
    for step, (losses, gradients) in enumerate(steps):
        assert len(losses) == (setup.microbatches if last else 0)
        assert sorted(gradients) == sorted(places_of(setup, rank))
        assert all(one is None or one.abs().max() > 0 for own in gradients.values() for one in own)
        numbers |= _named(step, last[0] if last else -1, losses, gradients)
    return numbers


def one_process(setup: Setup, references: Sequence[Reference]) -> Numbers:
    numbers: dict[str, Tensor | float | None] = {}
    for step, reference in enumerate(references):
        for replica, losses in enumerate(reference.losses):
            numbers |= _named(step, replica, losses, reference.gradients)
    return numbers


def assert_equal(setup: Setup, found: Sequence[Steps], wanted: Sequence[Reference]) -> None:
    """Assert that the steps of all ranks have the numbers of one process."""
    expected, names = one_process(setup, wanted), set[str]()
    for rank, steps in enumerate(found):
        numbers = numbers_of(setup, rank, steps)
        texts = differences(numbers, expected)
        assert not texts, f"rank {rank}: {texts}"
        names |= set(numbers)
    assert names == set(expected), f"no rank has {sorted(set(expected) - names)}"


def _named(step: int, replica: int, losses: Sequence[float], gradients: Mapping[ModulePlace, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"step {step}: replica {replica}: loss of microbatch {mb}": loss for mb, loss in enumerate(losses)
    }
    for (module, of_replica, stage), own in gradients.items():
        for number, one in enumerate(own):
            found[f"step {step}: {module}, replica {of_replica}, stage {stage}: gradient {number}"] = one
    return found


def row_of(setup: Setup) -> Row:
    steps = SeveralModules(setup)
    return Row(steps.run, steps.expected, RANKS)


ROWS = {name: row_of(setup) for name, setup in SETUPS.items()}

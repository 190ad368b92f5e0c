#!/usr/bin/env python
"""Write the table of docs/recipes/models.md: the time and memory of each recipe in examples/recipes, estimated from
sizes.

python scripts/model_recipes.py [--check]
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from made_parts import MadePart, markdown_table, renew  # noqa: E402

from benchmarks.arrivals import as_it_arrives, sequence_lengths  # noqa: E402
from examples.recipes import packed_rl_update, vlm_in_bubbles  # noqa: E402
from megatron_pp.features.modules.graph import module_graphs  # noqa: E402
from megatron_pp.features.modules.modules_plan import modules_plan, modules_spec  # noqa: E402
from megatron_pp.features.packing.packing import PackedStep, packed  # noqa: E402
from megatron_pp.features.packing.step_ahead import NextStep, plan_ahead  # noqa: E402
from megatron_pp.plan.builder import build_plan  # noqa: E402
from megatron_pp.plan.costs.stage_costs import StageCosts  # noqa: E402
from megatron_pp.plan.ir.instruction import FORWARD, Instruction  # noqa: E402
from megatron_pp.plan.ir.spec import Plan  # noqa: E402
from megatron_pp.plan.simulate.simulation import Simulation  # noqa: E402
from megatron_pp.plan.simulate.simulator import simulate  # noqa: E402
from megatron_pp.tools.advise.layers.gpus import gpu_named  # noqa: E402
from megatron_pp.tools.advise.model import Layer, total  # noqa: E402
from megatron_pp.tools.check.command import Answer, check  # noqa: E402
from megatron_pp.tools.check.findings import ERROR  # noqa: E402
from megatron_pp.tools.check.jobs.flag_table import read_flags  # noqa: E402
from megatron_pp.tools.check.jobs.read import Given, read_job  # noqa: E402
from megatron_pp.tools.check.priced import priced, transformer_of_job  # noqa: E402
from megatron_pp.tools.check.risks import known_faults  # noqa: E402

PAGE = ROOT / "docs" / "recipes" / "models.md"
RECIPES = ROOT / "examples" / "recipes"
COMMAND = re.compile(r"megatron-pp check --gpus (\d+) --gpu (\S+) examples/recipes/(\S+)")
UPDATES = 6


@dataclass(frozen=True)
class Numbers:
    """The numbers of one recipe. ``ours`` is faster than Megatron's schedule, "" if nothing is. Steps in ms, memory in
    GB."""

    gpus: int
    step: float
    bubble: float
    ours: str
    our_step: float
    memory: float
    device: float

    def cells(self) -> list[str]:
        return [
            f"{self.gpus:,}",
            f"{self.step / 1000:.3g} s",
            f"{self.bubble:.1%}",
            self.ours or "Megatron's",
            f"{self.our_step / 1000:.3g} s" if self.ours else "the same",
            f"{self.memory:.3g} of {self.device:g} GB",
        ]


def table() -> str:
    rows = [["recipe", "GPUs", "Megatron's schedule", "bubble", "fastest of this engine", "its step", "fullest rank"]]
    for path in sorted(path for path in RECIPES.iterdir() if path.suffix in (".sh", ".py") and path.stem[0] != "_"):
        numbers = OF_PROGRAMS[path.stem]() if path.suffix == ".py" else of_script(path)
        rows.append([f"[`{path.stem}`](../../examples/recipes/{path.name})", *numbers.cells()])
    return markdown_table(rows)


def of_script(path: Path) -> Numbers:
    """The numbers for the command in the head of a script. The flags are read by the table even if Megatron-LM is
    installed, and the known faults are those of the newest checked release, so that the page does not depend on the
    machine."""
    found = COMMAND.search(path.read_text(encoding="utf-8"))
    if found is None or found[3] != path.name:
        raise SystemExit(f"{path} has no line 'megatron-pp check --gpus N --gpu NAME examples/recipes/{path.name}'")
    job = replace(read_job(Given([str(path)], int(found[1]))), release=known_faults()[1])
    answer = check(job, gpu_named(found[2]))
    time, memory = _sections(answer, path.name)
    ours = [one for one in time["better"] if "pipeline_schedule" in one["change"]]
    name = re.search(r"pipeline_schedule='(\w+)'", ours[0]["change"]) if ours else None
    return Numbers(
        answer.job.gpus,
        time["step_ms"],
        time["bubble"],
        f"`{name[1]}`" if name else "",
        ours[0]["step_ms"] if ours else 0.0,
        memory["ranks"][memory["fullest"]]["total"],
        memory["device"],
    )


def _sections(answer: Answer, name: str) -> tuple[dict, dict]:
    """The data of the sections ``time`` and ``memory``. Ends the program if the answer has an error."""
    wrong = answer.findings(ERROR)
    if wrong:
        raise SystemExit(f"{name}: {wrong[0].text}")
    data = {section.name: section.data for section in answer.sections}
    time, memory = data["time"], data["memory"]
    assert isinstance(time, dict)
    assert isinstance(memory, dict)
    return time, memory


def of_packed_updates() -> Numbers:
    """The medians over several updates. An update has 128 responses with lengths of a public trace. Under Megatron's
    schedule the microbatches run in the order of arrival."""
    recipe = packed_rl_update
    gpu = gpu_named(packed_rl_update.GPU)
    job = read_flags(["packed_rl_update.py", *recipe.FLAGS.split()], recipe.GPUS, "a table")
    _, memory = _sections(check(job, gpu), "packed_rl_update.py")
    found = priced(job, gpu)
    full = recipe.RULES.cost([recipe.RULES.rank_tokens])

    def simulated(plan: Plan, step: PackedStep) -> Simulation:
        shares = tuple(cost / full for cost in step.costs)
        costs = replace(found.cut.costs, microbatches=shares)
        return simulate(plan, costs, found.network(gpu), found.plan.spec.device)

    theirs, ours = [], []
    for seed in range(UPDATES):
        step = packed(sequence_lengths("mooncake", 128, seed), recipe.RULES)
        spec = replace(found.plan.spec, num_microbatches=len(step.slots))
        running = build_plan(spec)
        answer = plan_ahead(NextStep(spec, step.costs))
        theirs.append(simulated(running, as_it_arrives(step)))
        planned = running if answer.proposal is None else answer.proposal.plan()
        ours.append(simulated(planned, step.ordered(answer.order)).makespan)
    return Numbers(
        recipe.GPUS,
        statistics.median(one.makespan for one in theirs),
        statistics.median(one.bubble_share for one in theirs),
        "planned updates",
        statistics.median(ours),
        memory["ranks"][memory["fullest"]]["total"],
        memory["device"],
    )


def of_encoders_in_bubbles() -> Numbers:
    """The numbers of the recipe with encoders in bubbles. Under Megatron's schedule the first stage encodes all
    images."""
    recipe = vlm_in_bubbles
    gpu = gpu_named(vlm_in_bubbles.GPU)
    job = read_flags(["vlm_in_bubbles.py", *recipe.LANGUAGE.split()], recipe.GPUS, "a table")
    _, memory = _sections(check(job, gpu), "vlm_in_bubbles.py")
    found = priced(job, gpu)
    size = found.plan.spec.pipeline_size
    language = found.cut.costs
    network = found.network(gpu)

    def encoder(images: int) -> Layer:
        words = [*recipe.VISION.split(), "--micro-batch-size", str(images), "--global-batch-size", str(16 * images)]
        of_images = transformer_of_job(read_flags(["vision", *words], recipe.GPUS, "a table"))
        return total(replace(of_images, causal=False).model(gpu).layers)

    whole, part = encoder(recipe.IMAGES), encoder(recipe.IMAGES // size)
    first = StageCosts.per_stage(
        *(_added(times, [one]) for times, one in zip(_times(language), _of(whole), strict=True))
    )
    theirs = simulate(found.plan, first, network, found.plan.spec.device)
    ranks = [(rank,) for rank in range(size)]
    slowest = max(range(size), key=lambda stage: language.forward[stage] + language.backward[stage])
    times = (part.forward, part.backward_input + part.weight), (language.forward[slowest], language.backward[slowest])
    (graph,) = module_graphs(recipe.modules(ranks, times), {"vision": ["language"]})
    plan = modules_plan(modules_spec(graph, found.plan.spec.num_microbatches, device=found.plan.spec.device))
    chunks = [[one] * size + list(row) for row, one in zip(_times(language), _of(part), strict=True)]
    ours = simulate(plan, StageCosts.per_stage(*chunks), network, plan.spec.device)
    kept = [
        found.cut.static[rank]
        + found.fixed[rank]
        + part.static
        + _most(order, (part.activation, found.cut.activation[rank]))
        for rank, order in enumerate(plan.orders)
    ]
    return Numbers(
        recipe.GPUS,
        theirs.makespan,
        theirs.bubble_share,
        "encoders in bubbles",
        ours.makespan,
        max(kept),
        memory["device"],
    )


def _times(costs: StageCosts) -> tuple[tuple[float, ...], ...]:
    return costs.forward, costs.backward_input, costs.weight


def _of(layer: Layer) -> tuple[float, float, float]:
    return layer.forward, layer.backward_input, layer.weight


def _added(times: Sequence[float], more: Sequence[float]) -> list[float]:
    """``times``, with ``more`` added to the first ones."""
    return [time + extra for time, extra in zip_longest(times, more, fillvalue=0.0)]


def _most(order: Sequence[Instruction], activation: tuple[float, float]) -> float:
    """The most GB of activations that a rank holds at a time. ``activation``: GB of one forward, by chunk."""
    held = most = 0.0
    for at in order:
        held += activation[at.chunk] if at.op == FORWARD else -activation[at.chunk]
        most = max(most, held)
    return most


OF_PROGRAMS: dict[str, Callable[[], Numbers]] = {
    "packed_rl_update": of_packed_updates,
    "vlm_in_bubbles": of_encoders_in_bubbles,
}
"""Recipes that are programs."""

if __name__ == "__main__":
    sys.exit(renew([MadePart(PAGE, "recipes", table)], __doc__.partition("\n\n")[0]))

"""The parts, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from gpu_day import outside
from gpu_day.bench import Bench, Machine
from gpu_day.parts import (
    ahead,
    contexts,
    exposed,
    facts,
    faults,
    links,
    megatron,
    more_waits,
    named,
    offload,
    output_layer,
    overlap,
    pairs,
    race,
    release,
    slices,
    steps,
    waits,
)


class Part(NamedTuple):
    """One part. ``deadline``: seconds after which it is killed. ``gpus``: how many it needs at least; ``most``: how
    many the machine may have at most. ``cuda``: whether it runs only on CUDA. ``one_gpu``: whether its ranks share the
    first GPU."""

    name: str
    title: str
    deadline: float
    work: Callable[[Bench], None]
    gpus: int = 1
    most: int | None = None
    cuda: bool = False
    one_gpu: bool = False
    packages: tuple[str, ...] = ()

    def reason_not_to_run(self, machine: Machine) -> str:
        """Why the part cannot run on this machine; "" if it can."""
        if machine.gpus < self.gpus:
            return f"needs {self.gpus} GPUs; this machine has {machine.gpus}"
        if self.most is not None and machine.gpus > self.most:
            return f"for a machine with {self.most} GPU; this one has {machine.gpus}"
        if self.cuda and not machine.has_gpus:
            return "needs a GPU"
        missing = [package for package in self.packages if not outside.is_installed(package)]
        return f"needs {', '.join(missing)}, which is not installed" if missing else ""


_MEGATRON = ("megatron.core",)
_ENGINE = (*_MEGATRON, "transformer_engine")
_OF_MEGATRON = {
    "megatron": ("its own layers", 110.0, False, _MEGATRON),
    "megatron_te": ("Transformer Engine", 110.0, True, _ENGINE),
    "megatron_fp8": ("FP8", 110.0, True, _ENGINE),
    "megatron_graphs": ("local graphs", 140.0, True, _MEGATRON),
    "megatron_te_graphs": ("graphs of Transformer Engine", 140.0, True, _ENGINE),
}

PARTS: tuple[Part, ...] = (
    Part("facts", "The machine", 60.0, facts.run),
    Part("ahead", "First steps of fresh processes, two ranks", 240.0, ahead.run),
    Part("more_waits", "Which further calls wait for the device", 110.0, more_waits.run, cuda=True),
    Part("named", "Two operations that wait for each other", 150.0, named.run, cuda=True),
    Part("links", "Links between pairs of GPUs", 40.0, links.pairs, gpus=2),
    Part("shaped_link", "A shaped link between two ranks on one GPU", 30.0, links.shaped, most=1),
    Part("race", "The deallocation race", 45.0, race.run),
    Part("release", "Releases and the compute stream", 20.0, release.run, cuda=True),
    Part("waits", "Calls that wait for the device", 25.0, waits.run, cuda=True),
    Part("first_steps", "First steps of processes, and new kernels on one rank", 140.0, steps.first),
    Part("ahead_4", "First steps of fresh processes, four ranks", 280.0, partial(ahead.run, size=4)),
    Part("steps", "Steps of every schedule and policy", 150.0, steps.run),
    Part("eight", "Steps at P=8", 50.0, steps.eight, gpus=8),
    *(
        Part(name, f"Megatron GPT: {variant}", deadline, megatron.part(variant), cuda=cuda, packages=packages)
        for name, (variant, deadline, cuda, packages) in _OF_MEGATRON.items()
    ),
    Part("megatron_times", "Megatron's own schedules on the same GPUs", 140.0, megatron.times, packages=_MEGATRON),
    Part("pairs", "Pairs of a mixture of experts", 30.0, pairs.run, gpus=2, cuda=True),
    Part("slices", "Slices of sequences, recomputed", 25.0, slices.run),
    Part("offload", "Offloaded activations", 25.0, offload.run),
    Part("output_layer", "A split output layer", 25.0, output_layer.run),
    Part("shapes", "Shapes that vary", 25.0, steps.variable),
    Part("faults", "Each rank raises, each is killed", 90.0, faults.run),
    Part("contexts", "Memory and contexts of processes", 20.0, contexts.run, cuda=True),
    Part("overlap", "What safety costs", 30.0, overlap.run),
    Part("overlap_mps", "What safety costs, under MPS", 60.0, overlap.under_mps, most=1, cuda=True),
    Part("exposed", "Exposed communication", 70.0, exposed.run, cuda=True),
    # Transfers over sockets are slow enough to show what overlap hides. On one GPU, contexts take turns.
    Part("one_gpu_race", "The deallocation race, two ranks on one GPU", 40.0, race.run, 2, cuda=True, one_gpu=True),
    Part("one_gpu_release", "Releases, two ranks on one GPU", 20.0, release.run, 2, cuda=True, one_gpu=True),
    Part("one_gpu_steps", "Steps, two ranks on one GPU", 50.0, steps.run, 2, cuda=True, one_gpu=True),
    Part("one_gpu_overlap", "What safety costs, two ranks on one GPU", 30.0, overlap.run, 2, cuda=True, one_gpu=True),
)


def chosen(names: Iterable[str]) -> list[Part]:
    """The parts of these names, in the table's order. All parts if no name is given."""
    wanted = set(names)
    return [part for part in PARTS if not wanted or part.name in wanted]

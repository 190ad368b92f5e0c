"""Steps of the toy model under every schedule and policy. Gradients must equal those of one process to the last bit."""

from __future__ import annotations

from gpu_day import ranks
from gpu_day.bench import Bench
from gpu_day.parts import named

EIGHT = 8
FIRST = ("interleaved_1f1b", "gis_h", "breadth_first")
ALONE_TIMEOUT = 10.0  # p2p_timeout
VARIABLE = {"1f1b": 1, "interleaved_1f1b": 2, "zb_v": 2}  # schedule -> chunks of a rank


def run(bench: Bench) -> None:
    """Compare steps of two ranks, and of four ranks: there each rank has channels that its neighbours do not share."""
    for size, debug in ((2, False), (2, True), (4, False)):
        mode = "in debug mode" if debug else "without debug mode"
        _compared(bench, ranks.steps_of(bench.sizes.schedules, tuple(ranks.POLICIES), 4, p2p_debug=debug), size, mode)


def first(bench: Bench) -> None:
    """New processes, in which CUDA has loaded no kernel, begin with schedules that post receives ahead. Then, under
    ``device_sync=False``, whose receives are posted earlier, one rank alone launches new kernels. It must not hang."""
    for schedule in FIRST:
        steps = ranks.steps_of((schedule,), ("overlap",), 4, bench.sizes.seq_length, bench.sizes.hidden)
        _compared(bench, steps, 2, f"{schedule} is the first")
    for schedule in FIRST:
        step = ranks.Step(schedule, 2, 4, {**ranks.OVERLAP, "device_sync": False, "p2p_timeout": ALONE_TIMEOUT})
        for who in range(2):
            said = ranks.outcome(lambda step=step, who=who: bench.ranks(named.launching_alone, step, who))  # type: ignore[misc]
            what = f"{schedule}, device_sync=False: rank {who} alone launches new kernels in each operation of a step"
            bench.check(said == ranks.EQUAL, f"{what}: {said}")


def eight(bench: Bench) -> None:
    """Compare steps of eight ranks under every schedule, with overlap."""
    _compared(bench, ranks.steps_of(bench.sizes.schedules, ("overlap",), EIGHT), EIGHT, "a GPU for each rank")


def variable(bench: Bench) -> None:
    """Compare steps whose sequence lengths differ between microbatches, so that ranks exchange shapes."""
    steps = {
        f"{schedule}, {policy}": ranks.Step(schedule, chunks, fields=fields, variable=True)
        for schedule, chunks in VARIABLE.items()
        for policy, fields in ranks.POLICIES.items()
    }
    _compared(bench, steps, 2, "lengths that vary")


def _compared(bench: Bench, steps: dict[str, ranks.Step], size: int, how: str) -> None:
    wrong = ranks.wrong(bench.ranks(ranks.differences, steps, size=size))
    differ = f"; these differ: {wrong}" if wrong else ""
    bench.check(not wrong, f"P={size}, {how}: the gradients of {len(steps)} steps are one process's{differ}")

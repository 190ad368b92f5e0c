"""Writes `docs/data/turns.csv`: simulated steps of plans under which no wait for the device can hang, relative to plans
that post receives early and are safe only if a single rank waits. Takes one to three minutes.

python scripts/turns_table.py
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_pp.errors import PlanError  # noqa: E402
from megatron_pp.plan.builder import lowered_plan  # noqa: E402
from megatron_pp.plan.costs.stage_costs import Link, Network, StageCosts  # noqa: E402
from megatron_pp.plan.ir.spec import ANY_WAIT, DEVICE_SYNC, ONE_QUEUE, Plan, PlanSpec  # noqa: E402
from megatron_pp.plan.orders import SCHEDULES  # noqa: E402
from megatron_pp.plan.simulate.simulator import simulate  # noqa: E402

TABLE = ROOT / "docs" / "data" / "turns.csv"
SIZES = (2, 4, 8, 16)
CHUNKS = (1, 2, 3, 4)
MICROBATCHES = (4, 8, 16, 64)
TRANSFERS = (0.1, 0.25, 0.5)  # of a forward
LARGEST = 1100  # P * V * M
RULES = {"any wait": (ONE_QUEUE, ANY_WAIT), "device_sync": (ONE_QUEUE, ANY_WAIT, DEVICE_SYNC)}


def specs(schedule: str) -> Iterator[PlanSpec]:
    family = SCHEDULES[schedule]
    for size, chunks, microbatches in product(SIZES, CHUNKS, MICROBATCHES):
        if family.chunks in (None, chunks) and size * chunks * microbatches <= LARGEST:
            yield PlanSpec(schedule, size, chunks, microbatches, device=(ONE_QUEUE,))


def ratios(spec: PlanSpec, device: tuple[str, ...]) -> Iterator[float]:
    """The ratio of the steps for each transfer time. Raises PlanError if the schedule has no such plan."""
    usual = lowered_plan(spec)
    other = lowered_plan(
        PlanSpec(spec.schedule, spec.pipeline_size, spec.num_chunks, spec.num_microbatches, device=device)
    )
    for transfer in TRANSFERS:
        yield _step(other, transfer) / _step(usual, transfer)


def _step(plan: Plan, transfer: float) -> float:
    network = Network(1.0, link=Link(bandwidth=1 / transfer))
    return simulate(plan, StageCosts.uniform(plan.placement.num_stages), network, plan.spec.device).makespan


def rows() -> Iterator[list[str]]:
    yield ["schedule", "plans", *(f"{name}: {which}" for name in RULES for which in ("best", "median", "worst"))]
    for schedule, family in SCHEDULES.items():
        if family.search is not None:
            continue
        found: dict[str, list[float]] = {name: [] for name in RULES}
        plans = 0
        for spec in specs(schedule):
            try:
                for name, device in RULES.items():
                    found[name] += ratios(spec, device)
            except PlanError:
                continue
            plans += 1
        cells = []
        for values in map(sorted, found.values()):
            cells += [f"{values[0]:.3f}", f"{values[len(values) // 2]:.3f}", f"{values[-1]:.3f}"]
        yield [f"`{schedule}`", str(plans), *cells]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    made = list(rows())  # made before the file is opened, so that an interrupt does not leave it empty
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(made)


if __name__ == "__main__":
    main()

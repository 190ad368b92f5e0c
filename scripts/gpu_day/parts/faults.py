"""Each rank in turn raises an error, and each is killed. Every other rank must soon raise an error that names the
place."""

from __future__ import annotations

from gpu_day import outside
from gpu_day.bench import Bench
from gpu_day.ranks import OVERLAP
from testkit.faults.fault_injection import EXCEPTION, KILL, Fault
from testkit.faults.fault_scenario_checks import complaints, limit, seconds_to_detect
from testkit.faults.fault_scenarios import Episode
from testkit.rank_processes import RanksTimedOutError

MOST_RANKS = 4
SLACK = 20.0  # more seconds on CPU cores that other programs use too


def run(bench: Bench) -> None:
    size = min(MOST_RANKS, max(2, bench.machine.gpus))
    faults = [Fault(kind, rank, 2, 0, 1) for kind in (EXCEPTION, KILL) for rank in range(size)]
    rows = []
    with outside.fault_pool(size, bench.start) as pool:
        for number, fault in enumerate((None, *faults)):
            episode = Episode(
                number, "1f1b", 1, 2 * size, 3, fault, p2p_timeout=60.0, backend=bench.machine.backend, fields=OVERLAP
            )
            what = "without a fault" if fault is None else f"{fault.kind} on rank {fault.rank}"
            try:
                reports = pool.run(episode, min(bench.left, 60.0))
            except RanksTimedOutError as hang:
                bench.check(False, f"{what}: {hang}")
                return
            wrong = complaints(episode, reports, size, 0.0 if bench.machine.has_gpus else SLACK)
            bench.check(not wrong, "; ".join([what, *wrong]))
            if fault is not None:
                rows.append([fault.kind, fault.rank, max(seconds_to_detect(episode, reports).values()), limit(episode)])
    bench.text(f"P={size}: seconds from a fault until the last of the other ranks has raised.")
    bench.table(["fault", "on rank", "s", "limit s"], rows)

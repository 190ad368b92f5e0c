#!/usr/bin/env python
"""Run thousands of pipeline steps with faults drawn by a seed, and write the results into docs/reliability.md.

    python scripts/soak.py                            all schedules and fault classes; about 12 minutes on two cores
    python scripts/soak.py --episodes 2 --clean-steps 200 --output -      a short run, printed
    python scripts/soak.py --backend nccl             on GPUs; several ranks may share one

An episode makes process groups, runs some steps of a small model, and destroys the groups. In one of its steps a rank
may raise (in forward, in backward, in the data iterator, out of memory), give a wrong shape, be killed, be stopped, or
be slow (up to twice p2p_timeout). Every other rank must soon raise an error that names rank, chunk and microbatch. A
slow rank must cause no error on any rank. Losses and gradients of all other steps must equal those of one process to
the last bit. Nothing may leak. The exit code is 1 if one of these does not hold.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from made_parts import long_tables_to_data, markdown_table  # noqa: E402

from megatron_pp.plan.ir.placement import Placement  # noqa: E402
from megatron_pp.plan.orders import SCHEDULES  # noqa: E402
from testkit.faults.fault_injection import DELAY, KILL, KINDS, SHAPE, Fault  # noqa: E402
from testkit.faults.fault_scenario_checks import complaints, leaks, limit, seconds_to_detect  # noqa: E402
from testkit.faults.fault_scenarios import Episode, Pool, Report, Resources  # noqa: E402
from testkit.rank_processes import RanksTimedOutError  # noqa: E402

CHUNKS = {"1f1b": 1, "interleaved_1f1b": 2, "zb_v": 2}
NAMES = {"1f1b": "1F1B", "interleaved_1f1b": "interleaved", "zb_v": "ZB-V"}
POLICIES: tuple[dict[str, Any], ...] = ({"overlap_p2p_comm": True}, {"batch_p2p_comm": True}, {})
FLAT_BYTES = 4 << 20  # growth over the clean steps that still counts as flat, because allocators keep some memory
SETTLING_EPISODES = 3
LARGE_LENGTH = 50_000  # sequence length; messages then have 1.6 MB
SLOW = (0.6, 2.0)  # in units of p2p_timeout
BEGIN = "<!-- made by scripts/soak.py; do not edit -->"
END = "<!-- end of what scripts/soak.py made -->"


@dataclass
class Tally:
    """The results of one fault class under one schedule."""

    injected: int = 0
    detected: int = 0
    undisturbed: int = 0
    seconds: list[float] = field(default_factory=list)
    limit: float = 0.0
    message: str = ""


@dataclass
class Results:
    """The results of all episodes."""

    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    episodes: int = 0
    steps: int = 0
    hangs: int = 0
    wrong_steps: int = 0
    trouble: list[str] = field(default_factory=list)
    leaks: dict[str, int] = field(default_factory=dict)
    first: dict[int, tuple[int, Resources]] = field(default_factory=dict)
    memory: list[tuple[str, int, list[int]]] = field(default_factory=list)
    load: list[float] = field(default_factory=list)

    def more_of(self, pid: int, resources: Resources) -> list[str]:
        """The resources of which process ``pid`` holds more than after its first episodes."""
        seen, first = self.first.get(pid, (0, resources))
        return leaks(first, resources) if seen >= SETTLING_EPISODES else []


def main() -> int:
    arguments = parse_arguments()
    results = Results()
    start = time.monotonic()
    rng = random.Random(arguments.seed)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Pool(arguments.ranks) as pool:
        try:
            run_all(pool, arguments, rng, results)
        except KeyboardInterrupt:
            results.trouble.append("the run was ended early")
        text = report(arguments, results, time.monotonic() - start)
        if arguments.output == "-":
            print(text)
        else:
            write_between_marks(Path(arguments.output), text)
            print(f"wrote {arguments.output}")
    print(f"{len(results.trouble)} complaints")
    return 1 if results.trouble else 0


def run_all(pool: Pool, arguments: argparse.Namespace, rng: random.Random, results: Results) -> None:
    """Run every episode. Stops after the first one that hangs."""
    for episode in [*drawn_episodes(arguments, rng), *clean_episodes(arguments)]:
        known = len(results.trouble)
        went_on = run_one(pool, episode, arguments.ranks, results)
        for line in results.trouble[known:]:
            print(f"WRONG: {line}", flush=True)
        if not went_on:
            return


def write_between_marks(path: Path, text: str) -> None:
    """Write ``text`` in place of the last run's text. A file without marks gets it at the end."""
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    head = before if not before or before.endswith("\n") else before + "\n"
    made = long_tables_to_data(path, "soak", "soak", text).strip("\n")
    path.write_text(f"{head}{BEGIN}\n\n{made}\n\n{END}{after}".rstrip("\n") + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seed", type=int, default=0, help="draws rank, step, chunk, microbatch and policy of each fault"
    )
    parser.add_argument("--ranks", type=int, default=3, help="pipeline size")
    parser.add_argument("--episodes", type=int, default=6, help="episodes per schedule and fault class")
    parser.add_argument("--steps", type=int, default=40, help="steps of an episode")
    parser.add_argument("--clean-steps", type=int, default=2000, help="steps without a fault, per schedule, for memory")
    parser.add_argument("--p2p-timeout", type=float, default=5.0, help="seconds")
    parser.add_argument("--schedules", nargs="+", choices=sorted(SCHEDULES), default=list(CHUNKS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="fault classes")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--output", default=str(ROOT / "docs" / "reliability.md"), help="file, or - to print")
    arguments = parser.parse_args()
    if arguments.ranks < 2 or arguments.steps < 3 or arguments.episodes < 1:
        parser.error("give at least 2 ranks, 3 steps and 1 episode")
    if arguments.backend == "nccl" and not torch.cuda.is_available():
        parser.error("--backend nccl needs a GPU")
    return arguments


def drawn_episodes(arguments: argparse.Namespace, rng: random.Random) -> Iterator[Episode]:
    """Episodes of all fault classes under all schedules, in random order."""
    wanted = [(s, kind) for s in arguments.schedules for kind in arguments.kinds] * arguments.episodes
    rng.shuffle(wanted)
    for number, (schedule, kind) in enumerate(wanted, 1):
        yield drawn(arguments, rng, number, schedule, kind)


def drawn(arguments: argparse.Namespace, rng: random.Random, number: int, schedule: str, kind: str) -> Episode:
    """An episode with a fault at a random place. The fault is before the last step, so that every rank detects it."""
    ranks = arguments.ranks
    chunks = CHUNKS.get(schedule, SCHEDULES[schedule].chunks or 2)
    placement = Placement(SCHEDULES[schedule].placement, ranks, chunks)
    places = [(r, c) for r in range(ranks) for c in range(chunks) if kind != SHAPE or _is_sent(placement, r, c)]
    rank, chunk = rng.choice(places)
    large = rng.random() < 0.15
    fault = Fault(
        kind,
        rank,
        rng.randrange(1, arguments.steps),
        chunk,
        rng.randrange(2 * ranks),
        seconds={DELAY: rng.choice(SLOW) * arguments.p2p_timeout, KILL: rng.choice((0.0, 0.0, 0.5))}.get(kind, 0.0),
    )
    return Episode(
        number,
        schedule,
        chunks,
        2 * ranks,
        arguments.steps if not large else min(arguments.steps, fault.step + 1),
        fault,
        arguments.p2p_timeout,
        arguments.backend,
        seq_length=LARGE_LENGTH if large else 3,
        fields=rng.choice(POLICIES),
    )


def _is_sent(placement: Placement, rank: int, chunk: int) -> bool:
    """Whether the chunk's output goes to another rank, which a wrong shape would disturb."""
    stage = placement.stage(rank, chunk)
    return stage + 1 < placement.num_stages and placement.crosses_ranks(stage)


def clean_episodes(arguments: argparse.Namespace) -> Iterator[Episode]:
    """One long episode without a fault per schedule."""
    for number, schedule in enumerate(arguments.schedules):
        chunks = CHUNKS.get(schedule, SCHEDULES[schedule].chunks or 2)
        yield Episode(
            1_000_000 + number,
            schedule,
            chunks,
            2 * arguments.ranks,
            arguments.clean_steps,
            None,
            60.0,
            arguments.backend,
            fields=POLICIES[0],
            sample_every=max(1, arguments.clean_steps // 20),
        )


def run_one(pool: Pool, episode: Episode, ranks: int, results: Results) -> bool:
    """Run an episode and record its results. Returns False if ranks hang: later results would mean nothing."""
    what = f"{NAMES.get(episode.schedule, episode.schedule)}, {episode.fault}"
    print(f"episode {episode.number}: {what}", flush=True)
    results.episodes += 1
    try:
        reports = pool.run(episode, deadline=120.0 + episode.steps)
    except RanksTimedOutError as error:
        results.hangs += 1
        results.trouble.append(f"episode {episode.number} ({what}): {error}")
        return False
    results.load.append(os.getloadavg()[0])
    results.steps += max(report.steps_done for report in reports.values())
    results.wrong_steps += sum(len(report.wrong_steps) for report in reports.values())
    found = complaints(episode, reports, ranks)
    results.trouble += [f"episode {episode.number} ({what}): {line}" for line in found]
    if episode.fault is not None:
        count_fault(episode, reports, not found, results)
    compare_resources(pool, episode, reports, results)
    return True


def count_fault(episode: Episode, reports: dict[int, Report], right: bool, results: Results) -> None:
    """Count the fault, and record the seconds until its detection and one message."""
    fault = episode.fault
    assert fault is not None
    tally = results.tallies.setdefault((fault.kind, episode.schedule), Tally(limit=limit(episode)))
    tally.injected += 1
    if fault.kind == DELAY:
        tally.undisturbed += right
        return
    tally.detected += right
    tally.seconds += seconds_to_detect(episode, reports).values()
    others = [r.error[1] for rank, r in sorted(reports.items()) if r.error is not None and rank != fault.rank]
    if others and not tally.message:
        tally.message = others[0].splitlines()[0]


def compare_resources(pool: Pool, episode: Episode, reports: dict[int, Report], results: Results) -> None:
    """Record the resources of which a process holds more than after its first episodes."""
    pids = pool.pids()
    fault = episode.fault
    held = {rank: report.resources for rank, report in reports.items() if report.resources is not None}
    # If the receiver dies in the middle of a transfer, gloo ends the send only with the process group.
    may_be_stuck = fault is not None and fault.kind == KILL and episode.seq_length == LARGE_LENGTH
    patience = episode.group_timeout + 5.0 if may_be_stuck else 0.0
    held = pool.await_resources(held, lambda now: not any(results.more_of(pids[r], now[r]) for r in now), patience)
    for rank, resources in held.items():
        pid = pids[rank]
        for line in results.more_of(pid, resources):
            results.leaks[line.partition(":")[0]] = results.leaks.get(line.partition(":")[0], 0) + 1
            results.trouble.append(f"episode {episode.number}, rank {rank} leaks {line}")
        seen, first = results.first.get(pid, (0, resources))
        results.first[pid] = (seen + 1, resources if seen < SETTLING_EPISODES else first)
        if reports[rank].samples:
            compare_memory(episode, rank, list(reports[rank].samples), results)


def compare_memory(episode: Episode, rank: int, samples: list[int], results: Results) -> None:
    """Record the memory of a long clean episode. It must not grow after the first quarter."""
    results.memory.append((episode.schedule, rank, samples))
    growth = samples[-1] - samples[len(samples) // 4]
    if growth > FLAT_BYTES:
        results.trouble.append(
            f"{episode.schedule}, rank {rank}: memory grew by {growth / 2**20:.1f} MiB in clean steps"
        )


# -- the report ---


def report(arguments: argparse.Namespace, results: Results, seconds: float) -> str:
    """The text for docs/reliability.md. It has the machine's load, because detection takes longer on a busy machine."""
    busy = f"{statistics.median(results.load):.1f} (median)" if results.load else ""
    load = f"Load average of the machine, this run included: {busy}. " if busy else ""
    parts = [
        f"    python scripts/soak.py --seed {arguments.seed} --ranks {arguments.ranks} --episodes {arguments.episodes} "
        f"--steps {arguments.steps} --clean-steps {arguments.clean_steps} --p2p-timeout {arguments.p2p_timeout} "
        f"--backend {arguments.backend}",
        "",
        f"torch {torch.__version__}, Python {platform.python_version()}, {arguments.backend}, {arguments.ranks} "
        f"processes on {os.cpu_count()} cores; {results.episodes} episodes, {results.steps:,} pipeline steps, "
        f"{seconds / 60:.0f} minutes. {load}" + _other_backend(arguments.backend),
        "",
        *_totals(results),
        *(f"- WRONG: {line}" for line in results.trouble),
        "",
        "### Faults",
        "",
        *_faults(arguments, results),
        "",
        *_messages(results),
        "",
        *_memory(results),
        "",
    ]
    return "\n".join(parts)


def _other_backend(backend: str) -> str:
    return "" if backend == "nccl" else "NCCL: not yet measured (`--backend nccl` makes the same table on GPUs)."


def _faults(arguments: argparse.Namespace, results: Results) -> list[str]:
    lines = [
        "Seconds are from the fault until another rank raises its error: median and worst over all other ranks. A "
        "fault counts as detected if every rank raises the right error in time, and the error names rank, chunk and "
        "microbatch correctly. A slow rank must cause no error and no wrong number. The column *message* has the "
        "beginning of the error on one of the other ranks.",
        "",
    ]
    head = ["fault", "schedule", "backend", "injected", "detected", "median s", "worst s", "limit s", "message"]
    rows: list[Sequence[str]] = [head]
    for kind in arguments.kinds:
        for schedule in arguments.schedules:
            tally = results.tallies.get((kind, schedule))
            if tally is None:
                continue
            times = (
                (f"{statistics.median(tally.seconds):.2f}", f"{max(tally.seconds):.2f}", f"{tally.limit:.0f}")
                if tally.seconds
                else ("-", "-", "-")
            )
            outcome = f"undisturbed: {tally.undisturbed}" if kind == DELAY else str(tally.detected)
            cells = (kind, NAMES.get(schedule, schedule), arguments.backend, str(tally.injected), outcome, *times)
            rows.append((*cells, f"`{_brief(tally.message)}`" if tally.message else "-"))
    return [*lines, markdown_table(rows)]


def _brief(message: str) -> str:
    """The message without the text of the exception and without the positions of other ranks."""
    text = message
    for beginning_of_the_rest in (": injected fault", ": the output of", ", which last reported"):
        text = text.partition(beginning_of_the_rest)[0]
    return text.replace("testkit.faults.fault_injection.", "").replace("|", "/").replace("`", "'")


def _totals(results: Results) -> list[str]:
    injected = sum(t.injected for t in results.tallies.values())
    right = sum(t.detected + t.undisturbed for t in results.tallies.values())
    rows = [
        ("faults injected", injected),
        ("faults handled as specified", right),
        ("hangs", results.hangs),
        ("steps with wrong numbers", results.wrong_steps),
        *((f"episodes that left {name.replace('_', ' ')}", results.leaks.get(name, 0)) for name in _LEAKS),
    ]
    return [f"- {name}: {count}" for name, count in rows]


_LEAKS = ("handles", "tensors", "threads", "files", "shared_memory")


def _messages(results: Results) -> list[str]:
    rows: list[Sequence[str]] = [("fault", "what another rank says")]
    seen = set()
    for (kind, _), tally in results.tallies.items():
        if tally.message and kind not in seen:
            seen.add(kind)
            rows.append((kind, f"`{tally.message.replace('`', chr(39)).replace('|', '/')}`"))
    return ["### Messages", "", markdown_table(rows)]


def _memory(results: Results) -> list[str]:
    if not results.memory:
        return []
    lines = [
        "### Memory",
        "",
        "Resident memory over steps without a fault, in MiB. Growth is counted from the end of the first quarter. Up "
        f"to {FLAT_BYTES >> 20} MiB count as flat.",
        "",
    ]
    rows: list[Sequence[str]] = [("schedule", "rank", "at the first quarter", "at the end", "growth")]
    for schedule, rank, samples in sorted(results.memory):
        quarter, end = samples[len(samples) // 4], samples[-1]
        cells = (f"{quarter / 2**20:.1f}", f"{end / 2**20:.1f}", f"{(end - quarter) / 2**20:+.2f}")
        rows.append((NAMES.get(schedule, schedule), str(rank), *cells))
    return [*lines, markdown_table(rows)]


if __name__ == "__main__":
    raise SystemExit(main())

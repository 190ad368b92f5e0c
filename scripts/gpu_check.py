#!/usr/bin/env python
"""Everything of the race suite that needs a GPU, in one call: two ranks over NCCL, on two GPUs, then sharing one.

    scripts/gpu_check.sh                   check, print, and write docs/gpu_results.md
    scripts/gpu_check.sh --out FILE        write elsewhere
    scripts/gpu_check.sh --seconds 120     in less time
    scripts/gpu_check.sh --cpu             the same over gloo without a GPU: tries the script, checks nothing of CUDA

Each section has its share of the time, and what a section leaves goes to those after it. Results are printed as they
come, and written after each section: a run that is ended early (SIGTERM, Ctrl-C) leaves what it has, with a list of
what was not run. Exit status 1 where a check failed or was not run.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
for folder in (str(ROOT), str(ROOT / "scripts")):
    if folder not in sys.path:
        sys.path.insert(0, folder)

import gpu_ranks  # noqa: E402
import torch  # noqa: E402
from made_parts import markdown_table  # noqa: E402

from benchmarks import gpu as gpu_benchmark  # noqa: E402
from tests.functional_tests.race_cases import KEEP_FREED_MEMORY_MAPPED, ONE_GPU_ENVIRONMENT  # noqa: E402
from tests.harness.processes import run_processes  # noqa: E402

STARTING = 15.0  # seconds: no section gets less, since its ranks need that long to start
CASES = {
    "a": "plain isend, deallocated",
    "b": "ours, deallocated without waiting",
    "c": "waited, then deallocated",
    "d": "not deallocated",
    "e": "handle dropped",
    "f": "gradient dropped",
    "h": "plain isend, then written into: must be corrupted",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: docs/gpu_results.md, with --cpu nowhere")
    parser.add_argument("--repeats", type=int, default=10, help="of every case of the race, for each dtype")
    parser.add_argument("--megabytes", type=int, default=64, help="of a tensor")
    parser.add_argument("--seconds", type=float, default=460.0, help="for everything (default: %(default)g)")
    parser.add_argument("--cpu", action="store_true", help="gloo on the CPU; writes only to --out")
    args = parser.parse_args(argv)
    if args.out is None and not args.cpu:
        args.out = ROOT / "docs" / "gpu_results.md"
    if args.out is not None and (args.out.is_dir() or not args.out.parent.is_dir()):  # known before it takes minutes
        parser.error(f"--out {args.out}: must be a file in a folder that exists")
    if not args.cpu and not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA device here; --cpu tries the script without one", file=sys.stderr)
        return 2
    if args.cpu:
        os.environ.update(KEEP_FREED_MEMORY_MAPPED)  # for the ranks, which are new processes
    report = Report(args.out, tried=args.cpu)
    try:
        Check(args, report).run()
    except KeyboardInterrupt:
        print("gpu_check: ended early", file=sys.stderr)
    report.save()
    print("\n".join(report.verdict()))
    if args.out is not None:
        print(f"wrote {args.out}")
    return 1 if report.failures or report.not_run else 0


@dataclass
class Report:
    """Lines of Markdown, printed as they come; what failed, and what was not run (yet)."""

    out: Path | None
    tried: bool
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)

    def add(self, *lines: str) -> None:
        self.lines += lines
        print(*lines, sep="\n", flush=True)

    def paragraph(self, text: str) -> None:
        self.add("", text, "")

    def table(self, columns: list[str], rows: list[list[str]]) -> None:
        self.add(*markdown_table([columns, *rows]).splitlines())

    def check(self, good: bool, what: str) -> str:
        if not good:
            self.failures.append(what)
        return "yes" if good else "**NO**"

    def verdict(self) -> list[str]:
        bad = [f"- FAILED: {failure}" for failure in self.failures]
        return bad + [f"- NOT RUN: {section}" for section in self.not_run] or ["All checks passed."]

    def save(self) -> None:
        if self.out is None:
            return
        what = "tried without a GPU (--cpu)" if self.tried else f"measured on {datetime.date.today().isoformat()}"
        head = ["# On a GPU", "", f"Written by scripts/gpu_check.sh; {what}.", ""]
        self.out.write_text("\n".join([*head, *self.verdict(), *self.lines, ""]))


class Section(NamedTuple):
    """A part of the check at one place. ``share``: of the time, about the seconds that it needs at most."""

    place: str
    title: str
    share: float
    work: Callable[..., None]

    def __str__(self) -> str:
        return f"{self.place}: {self.title}"


class Check:
    """Runs the sections one after the other, each in processes of its own, until the time is up."""

    def __init__(self, args: argparse.Namespace, report: Report) -> None:
        self.args = args
        self.report = report
        self.bytes = args.megabytes * 2**20
        self.ends = time.monotonic() + args.seconds
        self.budget = 0.0  # seconds of the section that runs
        self.places = {"gloo": ("gloo", ("cpu", "cpu"))} if args.cpu else _places_of_gpus()
        self.sections = [section for place in self.places for section in self._sections(place)]
        report.not_run = [str(section) for section in self.sections]

    def _sections(self, place: str) -> list[Section]:
        found = [
            Section(place, "facts", 30.0, self._facts),
            Section(place, "race", 80.0, self._race),
            Section(place, "steps", 90.0, self._steps),
            Section(place, "overlap", 40.0, self._overlap),
        ]
        if not self.args.cpu:
            found.insert(1, Section(place, "stream", 30.0, self._stream))
            if place == next(iter(self.places)):  # it takes two GPUs where there are two
                found.append(Section(place, "engines", 50.0, self._engines))
        return found

    def run(self) -> None:
        place = ""
        for number, section in enumerate(self.sections):
            left = self.ends - time.monotonic()
            if left <= 0.0:
                return
            share = section.share / sum(other.share for other in self.sections[number:])
            self.budget = min(left, max(left * share, STARTING))
            if section.place != place:
                place = section.place
                self.report.add("", f"## {place}", "")
            try:
                section.work(*self.places[place])
            except Exception as error:
                self.report.check(False, f"{section}: {type(error).__name__}: {str(error)[:600]}")
                self.report.paragraph(f"FAILED: {self.report.failures[-1]}")
            self.report.not_run.remove(str(section))
            self.report.save()

    def _ranks(self, place: tuple[str, tuple[str, ...]], work: Callable[..., Any], *args: Any) -> list[Any]:
        """``work`` on all ranks; raises what a rank raised, or when the section's time is up."""
        backend, devices = place
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            where = gpu_ranks.Place(backend, devices, f"{folder}/store")
            environment = ONE_GPU_ENVIRONMENT if where.shared and backend == "nccl" else {"GLOO_SOCKET_IFNAME": "lo"}
            try:
                return run_processes(
                    gpu_ranks.enter,
                    len(devices),
                    (where, work, args),
                    backend=None,
                    timeout=round(max(0.0, self.budget), 1),
                    environment=environment,
                )
            finally:
                self.budget -= time.monotonic() - began

    def _facts(self, *place: Any) -> None:
        found = self._ranks(place, gpu_ranks.facts)[0]
        self.report.add(", ".join(f"{key} {value}" for key, value in found.items()) + ".")

    def _stream(self, *place: Any) -> None:
        found = self._ranks(place, gpu_ranks.release_stall, self.bytes)[0]
        ours, control = found["ours"], found["wait at once"]
        busy, key = 4 * gpu_ranks.FORWARD_MS, "first to last forward, stream ms"
        late = 1e3 * gpu_ranks.LATE
        free = ours[key] < busy + 0.2 * late and ours["longest release, stream ms"] < 0.1 * late
        shown = control[key] > 0.5 * late
        setting = f"four forwards of {gpu_ranks.FORWARD_MS:g} ms, the receiver {late:g} ms late"
        self.report.paragraph(f"Releases of outputs and the compute stream: {setting}.")
        columns = list(ours)
        rows = [[name, *(f"{found[name][c]:.1f}" for c in columns)] for name in ("ours", "wait at once")]
        self.report.table(["", *columns], rows)
        stalls = self.report.check(free, "a release stalls the compute stream")
        control_stalls = self.report.check(shown, "the control does not stall the compute stream")
        self.report.paragraph(
            f"A release does not stall the compute stream: {stalls}; waiting at once does, as it must for this to mean "
            f"anything: {control_stalls}."
        )

    def _race(self, backend: str, devices: tuple[str, ...]) -> None:
        one, two = self._ranks((backend, devices), gpu_ranks.race, self.args.repeats, self.bytes)
        rows = []
        for key in one:
            letter, dtype = key.split()
            wrong = sum(max(pair) > 0 for pair in zip(one[key], two[key], strict=True))
            total = len(one[key])
            if letter == "h":  # the control
                verdict = self.report.check(wrong == total, f"case h, {dtype}: {wrong} of {total} corrupted, not all")
            elif letter == "a":
                verdict = "gloo: all" if backend == "gloo" else "NCCL: none, by record_stream (docs/race.md)"
            else:
                verdict = self.report.check(wrong == 0, f"case {letter}, {dtype}: {wrong} of {total} corrupted")
            rows.append([letter, CASES[letter], dtype, f"{wrong} of {total}", verdict])
        self.report.paragraph(f"The deallocation race, {self.args.megabytes} MB, the receiver at least 0.3 s late.")
        self.report.table(["case", "what", "dtype", "corrupted", "as it should be"], rows)

    def _steps(self, backend: str, devices: tuple[str, ...]) -> None:
        """Also at four ranks: there each rank has channels that its neighbours know nothing of."""
        for ranks, debug in ((devices, False), (devices, True), (devices * 2, False)):
            found = self._ranks((backend, ranks), gpu_ranks.steps, debug)
            wrong = {k: d for differences in found for k, d in differences.items() if d != 0.0}
            verdict = self.report.check(not wrong, f"gradients differ (P={len(ranks)}, debug {debug}): {wrong}")
            mode = "in debug mode" if debug else "without debug mode"
            self.report.paragraph(
                f"One step of each of {len(found[0])} schedules and policies, P={len(ranks)}, {mode}: "
                f"gradients equal one process's to the last bit: {verdict}."
            )

    def _overlap(self, *place: Any) -> None:
        found = self._ranks(place, gpu_ranks.overlap, self.bytes // 4, 40.0, 5)
        rows = []
        for variant in found[0]["seconds"]:
            slowest = sorted(max(pair) for pair in zip(*(rank["seconds"][variant] for rank in found), strict=True))
            peaks = [rank["peak MB"].get(variant) for rank in found]
            peak = f"{max(peaks):.0f}" if peaks[0] is not None else "-"
            rows.append([variant, f"{1e3 * slowest[0]:.0f}", f"{1e3 * slowest[len(slowest) // 2]:.0f}", peak])
        transfer = 1e3 * max(rank["transfer"] for rank in found)
        self.report.paragraph(
            "What safety costs: interleaved 1F1B, P=2, V=2, M=8, forward 40 ms, backward 80 ms, "
            f"{self.args.megabytes // 4} MB, one transfer {transfer:.1f} ms."
        )
        self.report.table(["variant", "ms (min)", "ms (median)", "peak MB"], rows)

    def _engines(self, *place: Any) -> None:
        """`benchmark.py gpu`, with the peers that are installed."""
        sizes = [self.args.megabytes / 8, self.args.megabytes / 2]
        measured = gpu_benchmark.run(
            argparse.Namespace(mib=sizes, forward_ms=10.0, microbatches=8, rounds=3, timeout=self.budget)
        )
        self.report.paragraph(f"{measured.title}: forward 10 ms, backward 20 ms, M=8. {' '.join(measured.notes)}")
        rows = [[_cell(row.get(column)) for column in measured.columns] for row in measured.rows]
        self.report.table(measured.columns, rows)


def _places_of_gpus() -> dict[str, tuple[str, tuple[str, str]]]:
    """Backend and devices of the ranks."""
    places = {"two ranks on one GPU": ("nccl", ("cuda:0", "cuda:0"))}
    if torch.cuda.device_count() > 1:
        places = {"two GPUs": ("nccl", ("cuda:0", "cuda:1")), **places}
    return places


def _ended(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends the run as Ctrl-C does; `timeout` sends it twice."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _cell(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _ended)
    raise SystemExit(main())

"""Run jobs of `cases` on sets of processes, with a deadline for each, and print one JSON line per job.

    echo '[{"case": {...}}, ...]' | python -m testkit.megatron.runner

Each line of the input is one list of jobs. Megatron-core is imported once. For each list a process is forked from this
one, in a session of its own, and the ranks are forked from that process. A set of ranks runs one job after the other.
If a rank raises or misses the job's deadline, the whole set is killed, and the next job starts a new set. So a schedule
that hangs costs only its deadline. From Python, the first call of `run_jobs(jobs)` starts this module as a process,
which later calls use too.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron_pp.tools.parity.workers.processes import end_with_parent
from testkit.megatron.cases import Case, Job, Outcome, compared
from testkit.rank_processes import DIED, RankProcesses, RanksTimedOutError

ROOT = Path(__file__).resolve().parents[2]
ENDED = "the list has ended"
_END_SECONDS = 30.0


class JobFailedError(Exception):
    """A rank raised. The message is its exception."""


class Ranks:
    """`world` forked processes in a gloo group, which together run one job at a time."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._directory = tempfile.TemporaryDirectory()
        store = os.path.join(self._directory.name, "store")
        self._processes = RankProcesses()
        for rank in range(world):
            self._processes.start(rank, _serve, (rank, world, store), "fork")

    def run(self, job: Job) -> list[dict[str, Any]]:
        """Run a job. Returns every rank's report. Raises JobFailedError or RanksTimedOutError; then the set must be
        closed."""
        for rank in range(self.world):
            self._processes.send(rank, job)
        reports: dict[int, dict[str, Any]] = {}
        for rank, message in self._processes.answers(range(self.world), job.deadline):
            if message == DIED:
                raise JobFailedError(f"rank {rank} died")
            kind, value = message
            if kind == "error":
                raise JobFailedError(f"rank {rank}: {value}")
            reports[rank] = value
        return [reports[rank] for rank in range(self.world)]

    def close(self) -> None:
        self._processes.end()
        self._directory.cleanup()


def _serve(pipe: Connection, rank: int, world: int, store: str) -> None:
    end_with_parent()
    import torch
    import torch.distributed as dist

    from testkit.megatron import lab as megatron_lab

    torch.set_num_threads(1)
    dist.init_process_group("nccl", store=dist.FileStore(store, world), rank=rank, world_size=world)
    while True:
        job = pipe.recv()
        try:
            pipe.send(("ok", megatron_lab.run_job(job)))
        except Exception as error:  # the parent handles it; this set of ranks is not used again
            if os.environ.get("MEGATRON_RUNNER_TRACEBACK"):
                traceback.print_exc()
            place = f" ({_place_of(error)})" if job.check else ""
            pipe.send(("error", f"{type(error).__name__}: {error}{place}"))


def _place_of(error: Exception) -> str:
    """The place where a check raised ``error``, because the traceback stays in the rank's process."""
    frames = traceback.extract_tb(error.__traceback__)
    return ", called by ".join(f"{frame.name} in {frame.filename}:{frame.lineno}" for frame in reversed(frames))


def serve() -> None:
    """The body of the process. For each line of the input it writes the list's process id, the Outcomes, and ENDED.

    All modules that ranks need are imported before the ranks are forked, so that no rank imports them again, and no
    garbage collection scans them.
    """
    gc.disable()
    for name in ("testkit.megatron.lab", "megatron_pp.integrations.megatron_core"):
        importlib.import_module(name)
    importlib.import_module("megatron_pp.integrations.megatron.releases.release").load_megatron()
    gc.enable()
    for line in sys.stdin.buffer:
        jobs = [Job.from_dict(raw) for raw in json.loads(line)]
        _import_checks(jobs)
        gc.freeze()
        child = os.fork()
        if child == 0:
            os.setsid()
            end_with_parent()
            print(os.getpid(), flush=True)  # written here, so that it comes before all outcomes
            try:
                serve_jobs(jobs)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        print("\n" + ENDED, flush=True)  # a line of a process that was killed may be unfinished


def _import_checks(jobs: list[Job]) -> None:
    """Import the modules of the jobs' checks. An error is ignored: it is raised again when the check runs, and is then
    the job's outcome."""
    for module in {job.check.partition(":")[0] for job in jobs if job.check}:
        with contextlib.suppress(Exception):
            importlib.import_module(module)


def serve_jobs(jobs: list[Job]) -> None:
    """Run the jobs in order, and print an Outcome as JSON for each. Each set of ranks waits for the next job of its
    size."""
    sets: dict[int, Ranks] = {}
    for job in jobs:
        world = job.case.world
        if world not in sets:
            sets[world] = Ranks(world)
        try:
            outcome = merge(sets[world].run(job))
        except (JobFailedError, RanksTimedOutError) as trouble:
            sets.pop(world).close()
            outcome = Outcome("hang" if isinstance(trouble, RanksTimedOutError) else "error", str(trouble))
        print(json.dumps(vars(outcome)), flush=True)
    for ranks in sets.values():
        ranks.close()


def merge(reports: list[dict[str, Any]]) -> Outcome:
    def largest(key: str) -> float | None:
        values = [report[key] for report in reports if report.get(key) is not None]
        return max(values) if values else None

    return Outcome(
        status="ok",
        loss_difference=largest("loss_difference"),
        grad_difference=largest("grad_difference"),
        param_difference=largest("param_difference"),
        note_difference=largest("note_difference"),
        grad_size=largest("grad_size") or 0.0,
        compared=sum(report.get("compared", 0) for report in reports),
        losses=next((report["losses"] for report in reversed(reports) if report["losses"]), []),
        traces=[report.get("trace", []) for report in reports],
        facts=[report.get("facts") for report in reports],
    )


def run_jobs(
    jobs: list[Job], deadline: float = 600.0, on_outcome: Any = None, checkout: str | None = None
) -> list[Outcome]:
    """Run the jobs in this module's process, and return one Outcome per job.

    deadline: seconds for all jobs together; then the ranks are killed, and the remaining jobs are reported as "hang".
    on_outcome(job, outcome): called for each outcome when it arrives.
    checkout: folder whose Megatron-core is used instead of the installed one.
    """
    process = _process(checkout)
    assert process.stdin is not None
    outcomes: list[Outcome] = []
    end = time.monotonic() + deadline
    process.stdin.write(json.dumps([job.to_dict() for job in jobs]).encode() + b"\n")
    child = _read_line(process, end)
    try:
        while len(outcomes) < len(jobs):
            line = _read_line(process, end)
            if line is None or line.strip() == ENDED.encode():
                break
            if line.startswith(b"{"):
                outcomes.append(Outcome(**json.loads(line)))
                if on_outcome is not None:
                    on_outcome(jobs[len(outcomes) - 1], outcomes[-1])
    finally:
        _end_list(process, child, len(outcomes) == len(jobs))
    missing = len(jobs) - len(outcomes)
    return outcomes + [Outcome("hang", f"not run within {deadline:g} s")] * missing


@functools.cache
def _process(checkout: str | None) -> subprocess.Popen[bytes]:
    """The process that serves this one as long as it lives. Each checkout has its own."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), checkout, environment.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "testkit.megatron.runner"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,  # unbuffered, so that select() sees every unread line
        env=environment,
        start_new_session=True,
    )
    atexit.register(_kill_session, process.pid)
    return process


def _read_line(process: subprocess.Popen[bytes], end: float) -> bytes | None:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
    if not ready:
        return None
    return process.stdout.readline() or None


def _end_list(process: subprocess.Popen[bytes], child: bytes | None, complete: bool) -> None:
    """Read the output of a list to its end. If the list is not complete, kill its processes first."""
    if child is not None and not complete:
        _kill_session(int(child))
    end = time.monotonic() + _END_SECONDS
    while (line := _read_line(process, end)) is not None:
        if line.strip() == ENDED.encode():
            return
    if child is not None:
        _kill_session(int(child))
    _kill_session(process.pid)
    process.wait()
    _process.cache_clear()


def _kill_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def parity_jobs(cases: list[Case], directory: str | Path) -> list[Job]:
    """Jobs that compare the cases with PP=1 of the same model."""
    return compared(cases, reference_case, f"{directory}/reference{{n}}.pt")


def reference_case(case: Case) -> Case:
    """The case of one process that has the whole model, under Megatron's own schedule.

    With tied embeddings a pipeline accumulates the gradients of the embedding and of the output layer separately, and
    adds the two sums in finalisation. So the reference keeps them separate too. If it added them microbatch by
    microbatch, the last bit would differ.
    """
    return Case(
        model=case.model,
        engine="megatron",
        microbatches=case.microbatches,
        variable_shapes=case.variable_shapes,
        deallocate=False,
        split_tied=case.model.tied,
    )


if __name__ == "__main__":
    serve()

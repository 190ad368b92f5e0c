"""What the parts reach outside of their program: processes, and what only a machine with GPUs answers.

The one seam: on virtual devices tests replace these names, and of the parts only sizes and limits of time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks import shaped_network
from megatron_pp.tools.parity.processes import end_with_parent
from testkit.faults.fault_scenarios import Pool
from testkit.processes import run_processes

_SMI_SECONDS = 10.0
_ENDINGS = (signal.SIGINT, signal.SIGTERM)

links_of = shaped_network.shaped_network
"""Links of a chosen rate between the ranks of one machine; raises BenchmarkError where that is not allowed."""


def gpu_count() -> int:
    return torch.cuda.device_count()


def machine_words(gpus: int) -> str:
    """What results depend on. Does not use CUDA: the parts' processes are forked from this one."""
    names = sorted(set(nvidia_smi("--query-gpu=name", "--format=csv,noheader").splitlines()))
    return f"{gpus} x {' and '.join(names) or 'GPU'}, torch {torch.__version__}"


def run_ranks(
    work: Callable[..., Any], size: int, args: tuple[Any, ...], seconds: float, environment: dict[str, str], start: str
) -> list[Any]:
    """``work(rank, size, *args)`` in ``size`` processes, the results by rank. ``start``: multiprocessing's method.

    Raises RankFailedError, or RanksTimedOutError after ``seconds``; no rank outlives the call, nor its caller.
    """
    return run_processes(
        _rank, size, (work, args), backend=None, timeout=seconds, environment=environment, start_method=start
    )


def _rank(rank: int, size: int, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    end_with_parent()
    return work(rank, size, *args)


def at_once(jobs: Sequence[Callable[[], Any]], workers: int) -> list[Any]:
    """What ``jobs`` return, as many at a time as there are ``workers``."""
    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(lambda job: job(), jobs))


def fault_pool(size: int, start: str) -> Pool:
    """Processes that a fault may kill; to be used as a context manager."""
    return Pool(size, start)


def own_process(body: Callable[[Callable[[Any], None]], None], seconds: float, receive: Callable[[Any], None]) -> str:
    """Run ``body(send)`` in a process with a session of its own; ``receive`` gets what it sends.

    Returns how it ended, "" where well. After ``seconds``, or when this call is interrupted, the whole session is
    killed: whatever the body had started.
    """
    context = multiprocessing.get_context("fork")  # this program has no threads, and has not used CUDA
    here, there = context.Pipe(duplex=False)
    held = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)  # one between the fork and `try` would leave it running
    process = context.Process(target=_session, args=(body, there))
    process.start()
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        there.close()
        return _received(here, seconds, receive)
    finally:
        process.join(0.2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()
        here.close()


def _session(body: Callable[[Callable[[Any], None]], None], pipe: Connection) -> None:
    os.setsid()
    end_with_parent()
    os.dup2(2, 1)  # what libraries print does not go between the lines of the results
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDINGS)
    body(pipe.send)
    pipe.send(None)


def _received(pipe: Connection, seconds: float, receive: Callable[[Any], None]) -> str:
    until = time.monotonic() + seconds
    while pipe.poll(max(0.0, until - time.monotonic())):
        try:
            message = pipe.recv()
        except EOFError:
            return "its process ended before it was through"
        if message is None:
            return ""
        receive(message)
    return f"not done within its {seconds:.0f} s"


def is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


# -- what a machine with GPUs answers ----------------------------------------------------------------------------------


def nvidia_smi(*arguments: str) -> str:
    """What ``nvidia-smi`` prints; "" where there is none, or it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=_SMI_SECONDS)
        return done.stdout if done.returncode == 0 else ""
    return ""


def contexts() -> list[int]:
    """The devices on which this process has a CUDA context."""
    return [index for index in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(index)]


def peer_access(one: int, other: int) -> bool:
    """Whether a GPU may read the other's memory."""
    return torch.cuda.can_device_access_peer(one, other)


def peak_mib(device: torch.device, step: Callable[[], Any]) -> float:
    """The most MiB allocated on ``device`` while ``step()`` runs, beyond what was there."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def limit_memory(device: torch.device, gib: float) -> None:
    """The process may allocate no more on ``device``."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total), device)


def allocator_retries(device: torch.device) -> int:
    """How often an allocation first had to give cached blocks back."""
    return int(torch.cuda.memory_stats(device)["num_alloc_retries"])


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)  # type: ignore[no-any-return]


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str]]:
    """The environment of processes that share a GPU by MPS, whose daemon runs meanwhile. Raises RuntimeError where it
    does not start. The GPU's compute mode stays as it is."""
    program = shutil.which("nvidia-cuda-mps-control")
    if program is None:
        raise RuntimeError("there is no nvidia-cuda-mps-control")
    with tempfile.TemporaryDirectory(prefix="mps_") as folder:  # a socket's path is short
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        around = {**os.environ, **environment}
        done = subprocess.run([program, "-d"], env=around, capture_output=True, text=True, timeout=_SMI_SECONDS)
        if done.returncode:
            raise RuntimeError(f"MPS does not start: {(done.stderr or done.stdout).strip()[:200]}")
        try:
            yield environment
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    [program], input="quit\n", env=around, capture_output=True, text=True, timeout=_SMI_SECONDS
                )

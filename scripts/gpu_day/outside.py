"""The functions by which parts reach outside of their program: processes, and questions to a machine with GPUs.

Tests on virtual devices replace these names. In the parts they replace only sizes and time limits.
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
from megatron_pp.tools.parity.workers.processes import end_with_parent
from testkit.faults.fault_scenarios import Pool
from testkit.processes import run_processes

_SMI_SECONDS = 10.0
_ENDINGS = (signal.SIGINT, signal.SIGTERM)

links_of = shaped_network.shaped_network
"""Links of a chosen rate between the ranks of one machine. Raises BenchmarkError if the machine does not allow them."""


def gpu_count() -> int:
    return torch.cuda.device_count()


def machine_words(gpus: int) -> str:
    """The GPUs and the torch release, on which results depend. Does not use CUDA: parts are forked from this
    process."""
    names = sorted(set(nvidia_smi("--query-gpu=name", "--format=csv,noheader").splitlines()))
    return f"{gpus} x {' and '.join(names) or 'GPU'}, torch {torch.__version__}"


def run_ranks(
    work: Callable[..., Any], size: int, args: tuple[Any, ...], seconds: float, environment: dict[str, str], start: str
) -> list[Any]:
    """Run ``work(rank, size, *args)`` in ``size`` processes. Returns the results by rank.

    ``start`` is multiprocessing's start method. Raises RankFailedError, or RanksTimedOutError after ``seconds``. No
    rank outlives the call or its caller.
    """
    return run_processes(
        _rank, size, (work, args), backend=None, timeout=seconds, environment=environment, start_method=start
    )


def _rank(rank: int, size: int, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    end_with_parent()
    return work(rank, size, *args)


def at_once(jobs: Sequence[Callable[[], Any]], workers: int) -> list[Any]:
    """The results of ``jobs``, of which ``workers`` run at the same time."""
    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(lambda job: job(), jobs))


def fault_pool(size: int, start: str) -> Pool:
    """A pool of processes that a fault may kill. It is a context manager."""
    return Pool(size, start)


def own_process(body: Callable[[Callable[[Any], None]], None], seconds: float, receive: Callable[[Any], None]) -> str:
    """Run ``body(send)`` in a process with a session of its own; ``receive`` gets what it sends.

    Returns "", or why it failed. After ``seconds``, or when this call is interrupted, the whole session is killed, with
    all processes that ``body`` has started.
    """
    context = multiprocessing.get_context("fork")  # this program has no threads, and has not used CUDA
    here, there = context.Pipe(duplex=False)
    # A signal between the fork and `try` would leave it running.
    held = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)
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
    os.dup2(2, 1)  # keeps prints of libraries out of the results on stdout
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
            return "its process ended early"
        if message is None:
            return ""
        receive(message)
    return f"not done within its {seconds:.0f} s"


def is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


# -- questions to a machine with GPUs ----------------------------------------------------------------------------------


def nvidia_smi(*arguments: str) -> str:
    """The output of ``nvidia-smi``; "" if it is missing or fails."""
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
    """Whether GPU ``one`` can access the memory of GPU ``other``."""
    return torch.cuda.can_device_access_peer(one, other)


def peak_mib(device: torch.device, step: Callable[[], Any]) -> float:
    """The peak of the MiB that ``step()`` allocates on ``device``, beyond those allocated before."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def limit_memory(device: torch.device, gib: float) -> None:
    """Let this process allocate at most ``gib`` GiB on ``device``."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total), device)


def allocator_retries(device: torch.device) -> int:
    """How often an allocation had to return cached blocks to the device first."""
    return int(torch.cuda.memory_stats(device)["num_alloc_retries"])


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)  # type: ignore[no-any-return]


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str]]:
    """The environment for processes that share a GPU by MPS. Within the context its daemon runs. Raises RuntimeError if
    it does not start. The GPU's compute mode is not changed."""
    program = shutil.which("nvidia-cuda-mps-control")
    if program is None:
        raise RuntimeError("there is no nvidia-cuda-mps-control")
    with tempfile.TemporaryDirectory(prefix="mps_") as folder:  # short, because a socket's path is limited
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        around = {**os.environ, **environment}
        done = subprocess.run([program, "-d"], env=around, capture_output=True, text=True, timeout=_SMI_SECONDS)
        if done.returncode:
            raise RuntimeError(f"MPS did not start: {(done.stderr or done.stdout).strip()[:200]}")
        try:
            yield environment
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    [program], input="quit\n", env=around, capture_output=True, text=True, timeout=_SMI_SECONDS
                )

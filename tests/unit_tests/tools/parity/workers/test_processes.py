"""Ranks as processes: what remains of them after a good run, after an error, and after a rank that does not end."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_pp.tools.parity.workers.processes import RunError, run_ranks


def test_ranks_know_their_number_and_share_an_address(tmp_path: Path):
    def body(rank: int) -> None:
        names = ("RANK", "WORLD_SIZE", "MASTER_PORT")
        (tmp_path / f"{rank}.txt").write_text(" ".join(os.environ[name] for name in names))
        with socket.socket() as other, pytest.raises(OSError, match="in use"):  # before the store listens there
            other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))

    run_ranks(body, 2, tmp_path, 60.0)
    (first, size, port), (second, _, same) = ((tmp_path / f"{rank}.txt").read_text().split() for rank in range(2))
    assert (first, second, size, port) == ("0", "1", "2", same)


def test_ranks_do_not_end_what_this_process_has_left(tmp_path: Path):
    """An example is a process group in a reference cycle: its destructor joins threads that a forked process does not
    have."""
    import torch.distributed as dist

    class Holder:
        def __init__(self) -> None:
            self.group = dist.ProcessGroupGloo(dist.PrefixStore("left", dist.HashStore()), 0, 1)
            self.me = self

    def body(rank: int) -> int:
        return gc.collect()

    gc.disable()
    try:
        Holder()
        run_ranks(body, 1, tmp_path, 20.0)
    finally:
        gc.enable()


@pytest.mark.slow
def test_unequal_tensors_are_gathered_and_scattered(tmp_path: Path):
    """Megatron's dispatcher does this if experts are split and ranks have different numbers of tokens."""

    def body(rank: int) -> list[list[float]]:
        import torch
        import torch.distributed as dist

        from megatron_pp.tools.parity.cpu.cpu_collectives import redirect_distributed

        redirect_distributed()
        dist.init_process_group("nccl", device_id=torch.device("cpu"))
        gathered = [torch.zeros(size, 2) for size in (1, 3, 2)]
        dist.all_gather(gathered, torch.full((len(gathered[rank]), 2), float(rank)))
        parts = [torch.full((size, 2), float(10**rank)) for size in (1, 3, 2)]
        mine = torch.zeros(len(parts[rank]), 2)
        dist.reduce_scatter(mine, parts, group=dist.group.WORLD)
        return [torch.cat(gathered)[:, 1].tolist(), mine.flatten().tolist()]

    found = run_ranks(body, 3, tmp_path, 120.0)
    assert [gathered for gathered, _ in found] == [[0, 1, 1, 1, 2, 2]] * 3
    assert [scattered for _, scattered in found] == [[111.0] * 2 * size for size in (1, 3, 2)]


def test_the_error_of_a_rank_is_reported_and_other_ranks_end(tmp_path: Path):
    def body(rank: int) -> None:
        if rank == 1:
            raise ValueError("no such layer")
        time.sleep(600)

    with pytest.raises(RunError, match=r"(?s)rank 1 failed:.*ValueError: no such layer"):
        run_ranks(body, 2, tmp_path, 60.0)


def test_a_rank_that_does_not_end_is_reported(tmp_path: Path):
    with pytest.raises(RunError, match=r"ranks \[0\] did not end within 1 s"):
        run_ranks(lambda rank: time.sleep(600), 1, tmp_path, 1.0)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 0 was killed by SIGKILL"),
        (lambda: os._exit(0), "rank 0 ended with exit code 0"),
        (lambda: os._exit(3), "rank 0 ended with exit code 3"),
        (lambda: sys.exit(0), "rank 0 ended with exit code 0"),
    ],
)
def test_a_rank_that_ends_without_a_result_is_reported(tmp_path: Path, end, words):
    with pytest.raises(RunError, match=words):
        run_ranks(lambda rank: end(), 1, tmp_path, 60.0)


def test_a_rank_says_what_is_wrong_in_its_own_words(tmp_path: Path):
    def body(rank: int) -> None:
        print("reading flags")
        raise RunError("there are no steps")

    with pytest.raises(RunError, match=r"rank 0 failed: there are no steps:\n  reading flags$"):
        run_ranks(body, 1, tmp_path, 60.0)


def test_a_forked_process_that_comes_back_is_not_the_rank(tmp_path: Path):
    def body(rank: int) -> str:
        if not os.fork():
            return "child"
        os.wait()
        return "rank"

    assert run_ranks(body, 1, tmp_path, 60.0) == ["rank"]


@pytest.mark.slow
def test_processes_started_by_a_rank_end_with_the_rank(tmp_path: Path):
    def body(rank: int) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        (tmp_path / "child").write_text(str(child.pid))
        time.sleep(600)

    with pytest.raises(RunError, match="did not end"):
        run_ranks(body, 1, tmp_path, 3.0)
    child = int((tmp_path / "child").read_text())
    end = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2:3]:
        assert time.monotonic() < end, "it is still there"
        time.sleep(0.01)

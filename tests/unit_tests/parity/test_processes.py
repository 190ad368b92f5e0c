"""Ranks as processes: what they leave when all is well, when one raises, and when one does not end."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from megatron_pp.parity.processes import RunError, run_ranks


def test_ranks_know_their_number_and_share_an_address(tmp_path: Path):
    def body(rank: int) -> None:
        names = ("RANK", "WORLD_SIZE", "MASTER_PORT")
        (tmp_path / f"{rank}.txt").write_text(" ".join(os.environ[name] for name in names))
        with socket.socket() as other, pytest.raises(OSError, match="in use"):  # before the store listens there
            other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))

    run_ranks(body, 2, tmp_path, 60.0)
    (first, size, port), (second, _, same) = ((tmp_path / f"{rank}.txt").read_text().split() for rank in range(2))
    assert (first, second, size, port) == ("0", "1", "2", same)


@pytest.mark.slow
def test_unequal_tensors_are_gathered_and_scattered(tmp_path: Path):
    """As Megatron's dispatcher does where experts are split and ranks have tokens of other counts."""

    def body(rank: int) -> list[list[float]]:
        import torch
        import torch.distributed as dist

        from megatron_pp.parity.cpu_collectives import redirect_distributed

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


def test_the_error_of_a_rank_is_told_and_the_others_end(tmp_path: Path):
    def body(rank: int) -> None:
        if rank == 1:
            raise ValueError("no such layer")
        time.sleep(600)

    with pytest.raises(RunError, match=r"(?s)rank 1 failed:.*ValueError: no such layer"):
        run_ranks(body, 2, tmp_path, 60.0)


def test_a_rank_that_does_not_end_is_told(tmp_path: Path):
    with pytest.raises(RunError, match=r"ranks \[0\] did not end within 1 s"):
        run_ranks(lambda rank: time.sleep(600), 1, tmp_path, 1.0)

"""Ranks as processes: what they leave when all is well, when one raises, and when one does not end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from megatron_pp.parity.processes import RunError, run_ranks


def test_ranks_know_their_number_and_share_an_address(tmp_path: Path):
    def body(rank: int) -> None:
        names = ("RANK", "WORLD_SIZE", "MASTER_PORT")
        (tmp_path / f"{rank}.txt").write_text(" ".join(os.environ[name] for name in names))

    run_ranks(body, 2, tmp_path, 60.0)
    (first, size, port), (second, _, same) = ((tmp_path / f"{rank}.txt").read_text().split() for rank in range(2))
    assert (first, second, size, port) == ("0", "1", "2", same)


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

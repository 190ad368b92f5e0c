"""Ranks that are threads: whose error is raised."""

from __future__ import annotations

import threading

import pytest

from megatron_pp.testing.threads import run_ranks


def test_the_error_of_the_rank_that_failed_is_raised_not_that_of_a_rank_it_unblocked() -> None:
    unblocked = threading.Event()

    def rank_main(rank: int) -> None:
        if rank == 0:
            try:
                raise RuntimeError("aborted: rank 1: ValueError: wrong")
            finally:
                threading.Timer(0.1, unblocked.set).start()
        unblocked.wait(10.0)
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        run_ranks(2, rank_main)

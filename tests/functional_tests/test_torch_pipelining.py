"""torch's pipeline stages under our plans: the same bits as torch's own runtime.

All cases with processes share one start of four.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.functional_tests import torch_pipelining_checks as checks
from tests.harness.processes import run_processes

DIFFERENCES: dict[str, tuple[str, Callable[..., float]]] = {
    **{f"{name}, 4 ranks": ("whole", partial(checks.compare, name=name)) for name in checks.CHUNKS},
    **{f"{name}, 2 ranks": ("replicas", partial(checks.compare, name=name)) for name in checks.CHUNKS},
    **{f"{name}, replicas": ("replicas", partial(checks.compare_replicas, name=name)) for name in checks.CHUNKS},
    **{
        f"table of {name}": ("replicas", partial(checks.compare, name=name, table=True))
        for name in ("Interleaved1F1B", *checks.SPLITTING)
    },
    "mixed dtypes": ("whole", partial(checks.compare, name="1F1B", make=checks.mixed)),
    "mixed dtypes, V": ("replicas", partial(checks.compare, name="ZBVZeroBubble", make=checks.mixed)),
    "one weight twice": ("replicas", partial(checks.compare, name="ZBVZeroBubble", make=checks.tied)),
}


def _rank_main(rank: int, size: int, names: list[str]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    layouts = checks.layouts(size)
    return {name: DIFFERENCES[name][1](layouts[DIFFERENCES[name][0]]) for name in names}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_processes(_rank_main, 4, (list(DIFFERENCES),), timeout=180)


@pytest.mark.parametrize("case", DIFFERENCES)
def test_losses_outputs_and_gradients_are_torchs_to_the_last_bit(results: list[dict[str, Any]], case: str) -> None:
    assert [of_rank[case] for of_rank in results] == [0.0] * 4

"""Runs the cases of the deallocation race (docs/race.md), and checks what each of them shows."""

from __future__ import annotations

import torch

from gpu_day.bench import Bench
from testkit.race_cases import run_cases

WHAT = {
    "a": "plain isend, deallocated",
    "b": "ours, deallocated without waiting",
    "c": "waited, then deallocated",
    "d": "not deallocated",
    "e": "handle dropped",
    "f": "gradient dropped",
    "h": "plain isend, then written into",
}
_CONTROL, _PLAIN = "h", "a"
DTYPES = ("float32", "bfloat16")
_WHY = (
    "On NCCL cases a to f cannot tell one engine from another: torch calls `record_stream` on what it sends, and the "
    "stock allocator then keeps memory that was freed early until the send is over, for plain `isend` too. Case h, a "
    "write into what is being sent, must be corrupted: it shows that the check sees a fault at all. "
    "[The race](race.md#reproduced) says what can."
)


def run(bench: Bench) -> None:
    one, two = bench.ranks(_rank, bench.sizes.repeats, int(bench.sizes.megabytes * 2**20))
    rows = []
    for letter, what in WHAT.items():
        row = [letter, what]
        for dtype in DTYPES:
            pairs = list(zip(one[f"{letter} {dtype}"], two[f"{letter} {dtype}"], strict=True))
            corrupted = sum(max(pair) > 0 for pair in pairs)
            row.append(f"{corrupted} of {len(pairs)}")
            if letter == _CONTROL:
                bench.check(corrupted == len(pairs), f"case {letter}, {dtype}: all are corrupted")
            elif letter != _PLAIN:
                bench.check(corrupted == 0, f"case {letter}, {dtype}: none is corrupted")
        rows.append(row)
    bench.text(f"Messages of {bench.sizes.megabytes:g} MB, the receiver at least 0.3 s late; how many were corrupted.")
    bench.table(["case", "what", *DTYPES], rows)
    if not bench.one_gpu:
        bench.text(_WHY)


def _rank(rank: int, size: int, device: torch.device, repeats: int, num_bytes: int) -> dict[str, list[float]]:
    return run_cases(rank, size, dict.fromkeys(DTYPES, repeats), (str(device),) * size, num_bytes)

"""Runs one collective, which shows that the ranks can communicate at all. Then lists the hardware and the releases on
which all other numbers depend."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from gpu_day import outside
from gpu_day.bench import Bench

_PACKAGES = ("megatron-core", "transformer-engine")


def run(bench: Bench) -> None:
    size = 2 if bench.one_gpu else min(8, max(2, bench.machine.gpus))
    found = bench.ranks(_rank, size=size)
    wanted = size * (size - 1) / 2
    bench.check([one["sum"] for one in found] == [wanted] * size, f"an all-reduce over {size} ranks gives {wanted:g}")
    facts = {"ranks": str(size), **found[0]["facts"], **_installed()}
    driver = outside.nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").split()
    bench.text(", ".join(f"{key} {value}" for key, value in {**facts, "driver": driver[0] if driver else "-"}.items()))


def _rank(rank: int, size: int, device: torch.device) -> dict[str, object]:
    total = torch.full((4,), float(rank), device=device)
    dist.all_reduce(total)
    facts = {"torch": torch.__version__}
    if device.type == "cuda":
        facts["GPU"] = torch.cuda.get_device_name(device)
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["CUDA"] = str(torch.version.cuda)
    return {"sum": float(total[0]), "facts": facts}


def _installed() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found

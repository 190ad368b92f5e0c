"""Interleaved steps of Megatron-core's GPT with the distributed optimizer and overlapped collectives, TP 2, under both
engines: with Megatron's layers, Transformer Engine's, FP8, and CUDA graphs of layers. Also the time of steps under
Megatron's own schedules and under ours, in turns on the same GPUs."""

from __future__ import annotations

import importlib
import os
import statistics
import time
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gpu_day.bench import Bench, NotRun
from gpu_day.ranks import synchronize

CONNECTIONS = ("1", "8")  # CUDA_DEVICE_MAX_CONNECTIONS
SCRIPT = "pretrain_gpt_megatron"
PP, VP, TP = 2, 2, 2
STEPS = 3
FP8_SINCE = (8, 9)  # compute capability
# Makes two runs equal: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
_REPEATABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring"}


class Variant(NamedTuple):
    """One setting. ``tolerance``: of losses, relative to Megatron's. ``apart``: each engine trains in processes of its
    own, because both would capture graphs into the same record of Megatron's."""

    flags: str
    tolerance: float = 0.0
    apart: bool = False


_ENGINE = "--transformer-impl transformer_engine --bf16"
VARIANTS = {
    "its own layers": Variant(""),
    "Transformer Engine": Variant(_ENGINE, 1e-3),
    "FP8": Variant(f"{_ENGINE} --fp8-format hybrid", 2e-2),
    "local graphs": Variant("--cuda-graph-impl local", 1e-3, apart=True),
    "graphs of Transformer Engine": Variant(f"{_ENGINE} --cuda-graph-impl transformer_engine", 1e-3, apart=True),
}


def part(variant: str) -> Any:
    return partial(run, variant=variant)


def run(bench: Bench, variant: str) -> None:
    flags, tolerance, apart = VARIANTS[variant]
    size = PP * TP * (2 if bench.machine.gpus >= 2 * PP * TP else 1)
    replicas = size // (PP * TP)
    arguments = [*_flags(bench, replicas, PP * VP * (1 if apart else 2)), *flags.split()]  # capturing graphs takes long
    bench.preload(SCRIPT)
    theirs: list[float] = []
    for connections in CONNECTIONS:
        one = _trained(bench, size, connections, [*arguments, *([] if apart else ["--compare"])])
        if not apart:
            theirs = one["theirs"]
        elif not theirs:
            theirs = _trained(bench, size, connections, [*arguments, "--engine", "megatron"])["losses"]
        losses = {"ours": one["losses"], "theirs": theirs}
        bench.numbers(**{connections: {**losses, "gradient difference": one.get("difference")}})
        what = f"CUDA_DEVICE_MAX_CONNECTIONS={connections}"
        worst = _relative(one["losses"], theirs)
        bench.check(worst <= tolerance, f"{what}: losses are Megatron's, to {tolerance:g} (difference {worst:.3g})")
        if not (apart or tolerance):
            equal = one["difference"] == 0.0
            bench.check(equal, f"{what}: gradients are Megatron's to the last bit (difference {one['difference']:.3g})")
    bench.text(f"PP {PP}, V {VP}, TP {TP}, DP {replicas}, {STEPS} steps.")


def _flags(bench: Bench, replicas: int, layers: int) -> list[str]:
    return [
        *("--num-layers", str(layers), "--hidden-size", str(max(32, bench.sizes.hidden))),
        *("--num-attention-heads", "4", "--seq-length", str(max(16, bench.sizes.seq_length // 4))),
        *("--pipeline-model-parallel-size", str(PP), "--num-virtual-stages-per-pipeline-rank", str(VP)),
        *("--tensor-model-parallel-size", str(TP), "--use-distributed-optimizer", "--overlap-grad-reduce"),
        *("--overlap-param-gather", "--micro-batch-size", "1", "--global-batch-size", str(4 * replicas)),
        *("--train-iters", str(STEPS), "--max-data-bytes", "100000", "--strict"),
    ]


def _trained(bench: Bench, size: int, connections: str, arguments: list[str]) -> dict[str, Any]:
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": connections, **_REPEATABLE}
    found = bench.ranks(train, arguments, size=size, environment=environment)
    if "not run" in found[0]:
        raise NotRun(found[0]["not run"])
    return dict(found[0])


def train(rank: int, size: int, device: torch.device, arguments: list[str]) -> dict[str, Any]:
    """The losses of all steps. With ``--compare`` also those of Megatron's engine, and the largest gradient
    difference."""
    if "--fp8-format" in arguments and torch.cuda.get_device_capability(device) < FP8_SINCE:
        return {"not run": "FP8 needs a GPU of compute capability 8.9 or newer"}
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(device.index or 0))
    script: Any = importlib.import_module(SCRIPT)
    args = script.parse_arguments(arguments)
    script.start(args)
    try:
        return dict(script.train(args))
    finally:
        script.parallel_state.destroy_model_parallel()


# -- times -------------------------------------------------------------------------------------------------------------

SETTINGS = {  # flags, which name Megatron's schedules
    "1F1B": (),
    "interleaved 1F1B, overlapped": ("--num-virtual-stages-per-pipeline-rank", "2"),
    "interleaved 1F1B, batched": ("--num-virtual-stages-per-pipeline-rank", "2", "--no-overlap-p2p-communication"),
}
ENGINES = ("megatron_pp", "megatron")
MICROBATCHES = 8


def times(bench: Bench) -> None:
    """Time steps of both engines in turns, on the same model and data, PP 2 and TP 1. The gradients of all steps are
    compared."""
    hidden, sequence = 4 * max(8, bench.sizes.hidden), max(16, bench.sizes.seq_length)
    bench.preload(SCRIPT)
    rows: list[list[Any]] = []
    for name, more in SETTINGS.items():
        arguments = [
            *("--num-layers", "8", "--hidden-size", str(hidden), "--num-attention-heads", "4"),
            *("--seq-length", str(sequence), "--pipeline-model-parallel-size", str(PP), "--micro-batch-size", "1"),
            *("--global-batch-size", str(MICROBATCHES), "--max-data-bytes", "100000", "--strict", *more),
        ]
        found = bench.ranks(timed, arguments, bench.sizes.rounds, size=PP, environment=_REPEATABLE)
        worst = found[0]["difference"]
        bench.check(worst == 0.0, f"{name}: gradients are Megatron's to the last bit (difference {worst:.3g})")
        medians = {}
        for engine in ENGINES:
            slowest = [max(ms) for ms in zip(*(one["ms"][engine] for one in found), strict=True)]
            medians[engine] = statistics.median(slowest)
        ours, theirs = (medians[engine] for engine in ENGINES)
        rows.append([name, ours, theirs, ours / theirs])
    bench.text(
        f"Forward and backward of a step, PP {PP}, M={MICROBATCHES}, 8 layers, hidden {hidden}, sequence {sequence}."
    )
    bench.table(["Megatron's schedule", "ours ms", "Megatron's ms", "ours / Megatron's"], rows)


def timed(rank: int, size: int, device: torch.device, arguments: list[str], rounds: int) -> dict[str, Any]:
    """The milliseconds of each engine's steps after the first one, and the largest difference of a gradient."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(device.index or 0))
    script: Any = importlib.import_module(SCRIPT)
    args = script.parse_arguments(arguments)
    script.start(args)
    try:
        data = script.Data(args)
        trainers = {engine: script.Trainer(args, data, engine) for engine in ENGINES}
        ms: dict[str, list[float]] = {engine: [] for engine in ENGINES}
        worst = 0.0
        for step in range(rounds + 1):
            for engine in ENGINES if step % 2 else ENGINES[::-1]:
                dist.barrier()
                synchronize(device)
                began = time.perf_counter()
                trainers[engine].forward_backward(step)
                synchronize(device)
                if step:  # the first step warms up
                    ms[engine].append(1e3 * (time.perf_counter() - began))
            worst = max(worst, script.largest_difference(*(trainers[engine] for engine in ENGINES)))
            for engine in ENGINES:
                trainers[engine].update()
        return {"ms": ms, "difference": worst}
    finally:
        script.parallel_state.destroy_model_parallel()


def _relative(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference of a loss. Infinite if one is not finite."""
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    return worst if worst == worst else float("inf")

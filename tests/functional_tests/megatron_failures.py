"""Jobs of Megatron in which a rank fails at the end of its step: in the finalisation of gradients, or in the optimizer.

    python -m tests.functional_tests.megatron_failures '[["finalize", "raise", 1, "file", 0], ...]'

Each case is a place, a fault, the rank that fails, the kind of store, and metrics=N. The ranks are forked from this
process. The program prints one line of JSON per case: for each rank its error and after how many seconds it came, or
null for a rank that ended without an error.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from testkit.faults.ends import fail

RANKS, PIPELINE, PATIENCE = 4, 2, 3.0  # PATIENCE is config.p2p_timeout, in seconds
DEADLINE = 40.0
FAULT_STEP = 1


def train(place: str, how: str, here: bool, metrics: int) -> None:
    """Take steps of Megatron's GPT. Step ``FAULT_STEP`` fails on the rank that gets ``here``."""
    from megatron_pp.integrations import megatron_core
    from testkit.megatron import lab
    from testkit.megatron.cases import Case, Model

    case = Case(Model(layers=2), pp=PIPELINE, dp=RANKS // PIPELINE, microbatches=2, steps=3, optimizer="distributed")
    if metrics:
        _with_a_writer()
    with megatron_core.installed(p2p_timeout=PATIENCE, metrics=metrics):
        run = lab.Run(case)
        for step in range(case.steps):
            if here and step == FAULT_STEP:
                _arm(run, place, how)
            run.step(step)


def _with_a_writer() -> None:
    """Set Megatron's TensorBoard writer on the last rank, as its training loop does."""
    import torch.distributed as dist

    loop: Any = ModuleType("megatron.training.global_vars")
    writer = SimpleNamespace(add_scalar=lambda name, value, step: None) if dist.get_rank() == RANKS - 1 else None
    loop.get_tensorboard_writer = lambda: writer
    loop._GLOBAL_ARGS = SimpleNamespace(tensorboard_dir="a folder")
    sys.modules[loop.__name__] = loop


def _arm(run: Any, place: str, how: str) -> None:
    config, optimizer = run.config, run.optimizer
    if place == "finalize":
        config.finalize_model_grads_func = lambda *args, **more: fail(how)
    elif place == "optimizer":
        inner = optimizer.chained_optimizers[0] if hasattr(optimizer, "chained_optimizers") else optimizer
        inner.get_grad_norm = inner.prepare_grads = inner.step = lambda *args, **more: fail(how)
    else:  # between the two
        schedule = run._call

        def then_fails(*args: Any) -> Any:
            found = schedule(*args)
            fail(how)
            return found

        run._call = then_fails


def _rank(rank: int, case: list[Any], folder: str, port: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    place, how, victim, store_of, metrics = case
    log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    began, said = time.monotonic(), "no error"
    try:
        store: Any = dist.FileStore(f"{folder}/store", RANKS)
        if store_of == "rank 0":
            store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0, timedelta(seconds=30))
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=DEADLINE + 30)
        )
        train(place, how, rank == victim, metrics)
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    pipe.send((said, round(time.monotonic() - began, 2)))
    os._exit(0 if said == "no error" else 1)


def run_case(case: list[Any], port: int) -> list[Any]:
    """Run the case, and return the error, the seconds and the last log lines of each rank, or None for a silent one."""
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(RANKS):
            ours, theirs = context.Pipe(duplex=False)
            processes.append(context.Process(target=_rank, args=(rank, case, folder, port, theirs)))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        until, found = time.monotonic() + DEADLINE, []
        for rank, pipe in enumerate(pipes):
            wait = 0.0 if rank == case[2] and case[1] == "stop" else max(0.0, until - time.monotonic())
            try:
                found.append(pipe.recv() if pipe.poll(wait) else None)
            except EOFError:
                found.append(None)
        for process in processes:
            process.kill()
            process.join()
        logs = [Path(folder, f"log{rank}").read_text(errors="replace") for rank in range(RANKS)]
    return [
        None if one is None else (*one, [line for line in log.splitlines() if "megatron_pp" in line][-3:])
        for one, log in zip(found, logs, strict=True)
    ]


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main() -> None:
    import gc
    import importlib

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    gc.disable()
    for name in ("testkit.megatron.lab", "megatron_pp.integrations.megatron_core"):
        importlib.import_module(name)
    importlib.import_module("megatron_pp.integrations.megatron.releases.release").load_megatron()
    gc.enable()
    gc.freeze()
    for case in json.loads(sys.argv[1]):
        print(json.dumps(run_case(case, _free_port())), flush=True)


if __name__ == "__main__":
    main()

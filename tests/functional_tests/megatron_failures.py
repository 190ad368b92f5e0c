"""Jobs of Megatron in which a rank fails: in its step, at the end of its step, or in the optimizer.

    python -m tests.functional_tests.megatron_failures '[{"place": "finalize", "how": "raise", "victim": 1}, ...]'

Each case has the fields of ``Failure``. The ranks are forked from this process. The program prints one line of
JSON per case: for each rank its error and after how many seconds it came, or null for a rank that ended without an
error.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from testkit.faults.ends import fail

RANKS, PATIENCE = 4, 3.0  # PATIENCE is config.p2p_timeout, in seconds
DEADLINE = 40.0
FAULT_STEP = 1


@dataclass(frozen=True)
class Failure:
    """A failure of rank ``victim``.

    place     "finalize", "optimizer" or "between" the two; "forward", "backward" or "loss" of ``chunk`` and ``mb``;
              "evaluation": that forward in an evaluation; "reports": where reports of a V go to the last rank; "call":
              the rank calls the schedule otherwise than the others
    how       a way to ``fail``; "shape": the forward's output has another shape; for calls "again", "never", "count",
              "length" or "schedule"
    store     "file" or "rank 0", which has the store
    metrics   config.metrics
    schedule  config.pipeline_schedule; its stages are in a V. None: 1F1B
    pipeline  number of ranks of each pipeline
    """

    place: str
    how: str
    victim: int
    store: str = "file"
    metrics: int = 0
    schedule: str | None = None
    pipeline: int = 2
    chunk: int = 0
    mb: int = 0


def train(failure: Failure, here: bool) -> None:
    """Take steps of Megatron's GPT. Step ``FAULT_STEP`` fails on the rank that gets ``here``."""
    from megatron_pp.integrations import megatron_core
    from testkit.megatron import lab
    from testkit.megatron.cases import Case, Model

    in_v, size = failure.schedule is not None, failure.pipeline
    case = Case(
        Model(layers=2 * size if in_v else size),
        pp=size,
        vp=2 if in_v else None,
        dp=RANKS // size,
        microbatches=2 * size if in_v else size,
        policy="overlap" if in_v else "plain",
        schedule=failure.schedule,
        steps=3,
        optimizer="distributed",
    )
    if failure.metrics:
        _with_a_writer()
    with megatron_core.installed(p2p_timeout=PATIENCE, metrics=failure.metrics):
        run = lab.Run(case)
        for step in range(case.steps):
            run.config.step_number = step  # as from Megatron's training loop
            if here and step == FAULT_STEP:
                _arm(run, failure)
            if failure.place == "evaluation" and step == FAULT_STEP:
                run.evaluate(step)
            run.step(step)


def _with_a_writer() -> None:
    """Set Megatron's TensorBoard writer on the last rank, as its training loop does."""
    import torch.distributed as dist

    loop: Any = ModuleType("megatron.training.global_vars")
    writer = SimpleNamespace(add_scalar=lambda name, value, step: None) if dist.get_rank() == RANKS - 1 else None
    loop.get_tensorboard_writer = lambda: writer
    loop._GLOBAL_ARGS = SimpleNamespace(tensorboard_dir="a folder")
    sys.modules[loop.__name__] = loop


def _arm(run: Any, failure: Failure) -> None:
    config, optimizer, how = run.config, run.optimizer, failure.how
    if failure.place == "finalize":
        config.finalize_model_grads_func = lambda *args, **more: fail(how)
    elif failure.place == "optimizer":
        inner = optimizer.chained_optimizers[0] if hasattr(optimizer, "chained_optimizers") else optimizer
        inner.get_grad_norm = inner.prepare_grads = inner.step = lambda *args, **more: fail(how)
    elif failure.place == "between":
        schedule = run._call

        def then_fails(*args: Any) -> Any:
            found = schedule(*args)
            fail(how)
            return found

        run._call = then_fails
    elif failure.place == "reports":
        _arm_reports(how)
    elif failure.place == "call":
        _arm_call(run, failure)
    else:
        _arm_step(run, failure)


def _arm_step(run: Any, failure: Failure) -> None:
    """Let one forward, its loss function or its backward fail."""
    import torch

    from megatron_pp.common.module_attributes import wrapped_attribute

    forward, how, seen = run.loop.forward_step, failure.how, Counter[int]()

    def forward_step(iterator: Any, model: Any, *more: Any) -> Any:
        chunk = wrapped_attribute(model, "vp_stage") or 0
        is_here = (chunk, seen[chunk]) == (failure.chunk, failure.mb)
        seen[chunk] += 1
        if is_here and failure.place in ("forward", "evaluation") and how != "shape":
            fail(how)
        output, loss_func = forward(iterator, model, *more)
        if is_here and how == "shape":
            return torch.cat([output, output]), loss_func
        if is_here and failure.place == "backward":
            output.register_hook(lambda grad: fail(how))
        if is_here and failure.place == "loss":
            return output, lambda output: fail(how)
        return output, loss_func

    run.loop.forward_step = forward_step


def _arm_reports(how: str) -> None:
    """Let the rank fail when it has exchanged the sizes of the reports, before their tensors."""

    def fails(*args: Any, **more: Any) -> None:
        fail(how)

    from megatron_pp.integrations.megatron.steps import v_logs

    v_logs._check = fails


def _arm_call(run: Any, failure: Failure) -> None:
    """Let the rank call the schedule otherwise than the others."""
    schedule, how = run._call, failure.how

    def again(*args: Any) -> Any:
        schedule(*args)
        return schedule(run._iterators(FAULT_STEP), False)

    if how == "again":
        run._call = again
    elif how == "never":
        run._call = lambda *args: []
    elif how == "schedule":
        run.config.pipeline_schedule = "v_min" if failure.schedule != "v_min" else "zb_v"
    elif how == "count":
        run.case = replace(run.case, microbatches=run.case.microbatches + 1)
    else:
        run.case = replace(run.case, model=replace(run.case.model, seq=run.case.model.seq + 2))


def _rank(rank: int, failure: Failure, folder: str, port: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    began, said = time.monotonic(), "no error"
    try:
        store: Any = dist.FileStore(f"{folder}/store", RANKS)
        if failure.store == "rank 0":
            store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0, timedelta(seconds=30))
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=DEADLINE + 30)
        )
        train(failure, rank == failure.victim)
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    pipe.send((said, round(time.monotonic() - began, 2)))
    os._exit(0 if said == "no error" else 1)


def run_case(failure: Failure, port: int) -> list[Any]:
    """Run the job, and return the error, the seconds and the last log lines of each rank, or None for a silent one."""
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(RANKS):
            ours, theirs = context.Pipe(duplex=False)
            processes.append(context.Process(target=_rank, args=(rank, failure, folder, port, theirs)))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        until, found = time.monotonic() + DEADLINE, []
        for rank, pipe in enumerate(pipes):
            wait = 0.0 if rank == failure.victim and failure.how == "stop" else max(0.0, until - time.monotonic())
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
        print(json.dumps(run_case(Failure(**case), _free_port())), flush=True)


if __name__ == "__main__":
    main()

"""Megatron-core's GPTModel with layers of known length, on this rank. Importing this redirects CUDA to the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bubble import Lengths
from benchmarks.rounds import timed_rounds
from megatron_pp.integrations import megatron_core
from megatron_pp.plan.orders import SCHEDULES
from testkit.megatron import lab
from testkit.megatron.cases import Case


class TimedRun(lab.Run):
    """A run whose transformer layers only sleep. Their backwards are split if our schedule splits backwards."""

    def __init__(self, case: Case, lengths: Lengths) -> None:
        self.length = lengths.of_chunk(case.model.layers // case.pp)
        self.split = case.engine == "ours" and SCHEDULES[str(case.schedule)].splits_weight
        super().__init__(case)

    def _wrap(self, chunks: list[Any]) -> list[torch.nn.Module]:
        for chunk in chunks:
            self._time(chunk.decoder)
        return super()._wrap(chunks)

    def _time(self, decoder: Any) -> None:
        decoder.layers = torch.nn.ModuleList(_Layer(self.length, self.split) for _ in decoder.layers)


class _Layer(torch.nn.Module):
    """A sleeping layer with the interface of a transformer layer."""

    def __init__(self, length: Lengths, split: bool) -> None:
        super().__init__()
        self.stage = length.stage(split)

    def forward(self, hidden_states: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, None]:
        return self.stage(hidden_states), None


class RecordedRun(TimedRun):
    """A run whose transformer layers compute, and sleep in place of their second norm. It records all steps except the
    first in ``folder``."""

    def __init__(self, case: Case, lengths: Lengths, folder: Path) -> None:
        self.folder = folder
        super().__init__(case, lengths)

    def _wrap(self, chunks: list[Any]) -> list[torch.nn.Module]:
        wrapped = super()._wrap(chunks)
        self.config.trace_dir, self.config.trace_steps = str(self.folder), f"2-{self.case.steps}"
        return wrapped

    def _time(self, decoder: Any) -> None:
        for layer in decoder.layers:
            layer.pre_mlp_layernorm = self.length.stage(self.split)


def record(case: Case, lengths: Lengths, folder: Path) -> None:
    """Train for the case's steps under install(), as a RecordedRun. The ranks meet before each step, as they do in
    training for the gradient norm."""
    with megatron_core.installed():
        run = RecordedRun(case, lengths, folder)
        for step in range(case.steps):
            dist.barrier()
            run.step(step)


def in_turns(case: Case, make_run: Callable[[Case], lab.Run], warmup: int) -> dict[str, list[float]]:
    """The seconds on this rank of the case's steps under "megatron" and "ours", in turns, after ``warmup`` steps of
    each. Without chunks Megatron has no overlap, so its plain exchange is compared with our overlap."""
    alone = case.vp is None and case.policy.startswith("overlap")
    cases = {"megatron": replace(case, policy="plain") if alone else case, "ours": case}
    cases = {engine: replace(one, engine=engine) for engine, one in cases.items()}
    steps = {engine: functools.partial(make_run(one).step, 0) for engine, one in cases.items()}

    def around(engine: str) -> AbstractContextManager[Any]:
        return lab.engine(cases[engine])

    return timed_rounds(steps, case.steps, warmup, dist.barrier, around=around)

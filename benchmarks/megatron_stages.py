"""Megatron-core's GPTModel with layers of known length, on this rank. Importing this redirects CUDA to the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.bubble import Lengths
from megatron_pp.integrations import megatron_core
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.weight_grad import split_weight_grad
from tests.megatron import lab
from tests.megatron.cases import Case


class TimedRun(lab.Run):
    """A run whose transformer layers sleep where their second norm would be."""

    def __init__(self, case: Case, lengths: Lengths, folder: Path) -> None:
        self.lengths, self.folder = lengths, folder
        self.split = SCHEDULES[str(case.schedule)].splits_weight
        super().__init__(case)

    def _wrap(self, chunks: list[Any]) -> list[torch.nn.Module]:
        layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
        for layer in layers:
            layer.pre_mlp_layernorm = self.lengths.of_chunk(len(layers)).stage(self.split)
        if self.split:
            split_weight_grad(chunks)
        self.config.trace_dir, self.config.trace_steps = str(self.folder), f"2-{self.case.steps}"
        return super()._wrap(chunks)


def run_case(case: Case, lengths: Lengths, folder: Path) -> None:
    """Train for the case's steps under install(), and record all but the first in ``folder``."""
    with megatron_core.installed():
        run = TimedRun(case, lengths, folder)
        for step in range(case.steps):
            run.step(step)

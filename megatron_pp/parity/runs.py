"""One run of a training script under a layout: its processes, and what they recorded."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import sys
import tempfile
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_pp.parity import float64
from megatron_pp.parity.layout import Layout
from megatron_pp.parity.processes import RunError, run_ranks
from megatron_pp.parity.recorder import Record, Recorder

MEGATRON, OURS = "megatron", "ours"


@dataclass(frozen=True)
class Program:
    """The training script, and how a run of it is made."""

    script: str
    module: bool
    steps: int
    deadline: float
    gpu: bool
    load: Any  # megatron_pp.cli.run's load_script or load_module
    plugin: Any = None  # what installs our engine


@dataclass
class Runs:
    """Runs of one program, each done once. ``folder`` holds their files."""

    program: Program
    folder: Path
    done: dict[Any, list[Record]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def layout(self, layout: Layout, engine: str, dtype: str) -> list[Record]:
        """The record of each rank, in "float32" or "float64". Raises RunError."""
        self.alone(layout, dtype)
        return self._run(layout, engine, dtype, self._weights(layout))

    def alone(self, layout: Layout, dtype: str) -> Record:
        """Of one process that computes the same as ``layout``."""
        return self._run(layout.alone(), None, dtype, self._weights(layout))[0]

    def exact(self, layout: Layout) -> Record:
        """Of one process in float64; in float32 where the script cannot compute in that, which the notes say then."""
        if not self.notes:
            try:
                return self.alone(layout, "float64")
            except RunError as error:
                self.alone(layout, "float32")  # it cannot run at all
                self.notes.append(f"not compared in float64: {str(error).splitlines()[-1].strip()}")
        return self.alone(layout, "float32")

    def _weights(self, layout: Layout) -> str:
        return str(self.folder / f"weights{abs(hash(layout.alone()))}.npz")

    def _run(self, layout: Layout, engine: str | None, dtype: str, weights: str) -> list[Record]:
        key = (layout, engine, dtype)
        if key not in self.done:
            folder = Path(tempfile.mkdtemp(dir=self.folder))

            def body(rank: int) -> Record:
                return _train(self.program, layout, engine, dtype, weights)

            self.done[key] = run_ranks(body, layout.world, folder, self.program.deadline)
        return self.done[key]


def _train(program: Program, layout: Layout, engine: str | None, dtype: str, weights: str) -> Record:
    """The body of a rank."""
    import torch

    from megatron_pp.parity import batches

    torch.set_num_threads(1)
    if dtype == "float64":
        float64.compute_in_float64()
    if engine == OURS:
        program.plugin()
    recorder = Recorder(program.steps, weights, alone=engine is None)
    recorder.install()
    if has_training_loop():
        batches.install(layout.uneven_masks)
    with contextlib.suppress(SystemExit):
        program.load(program.script, layout.flags.words())()
    return recorder.finished()


def prepare(program: Program) -> None:
    """Import what the script imports, so that ranks, which are forked, need not; without a GPU, on the CPU stand-in.
    Raises RunError where Megatron-core is missing."""
    sys.path.insert(0, os.getcwd() if program.module else str(Path(program.script).resolve().parent))
    if not program.gpu:
        from megatron_pp.parity import cpu_layers, cpu_stand_in

        _for_older_python()
        cpu_stand_in.redirect()
        with cpu_stand_in.triton_stand_in():
            _import_all(program)
        cpu_layers.complete_layers()
        cpu_stand_in.allow_no_gpu()
    else:
        _import_all(program)


def has_training_loop() -> bool:
    """Whether the program, which has been prepared, trains by Megatron's own loop, with its flags; not one of its own
    on Megatron-core alone."""
    return "megatron.training.training" in sys.modules


def _for_older_python() -> None:
    """Megatron's main branch is written for Python 3.12."""
    vars(typing).setdefault("override", lambda function: function)


def _import_all(program: Program) -> None:
    names = ["megatron.core", "megatron.core.pipeline_parallel.schedules", "megatron.core.optimizer"]
    names += ["megatron_pp.integrations.megatron_core"]
    path = program.script
    if program.module:
        spec = importlib.util.find_spec(program.script)
        path = (spec and spec.origin) or ""
    if path:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.append(node.module)
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)

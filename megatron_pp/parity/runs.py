"""One run of a training script under a layout: its processes, and what they recorded."""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib.util
import os
import sys
import tempfile
import typing
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Queue
from typing import Any

from megatron_pp.parity import float64
from megatron_pp.parity.layout import NO_OPTIMIZER, RESTORE, SAVE, Layout
from megatron_pp.parity.processes import RunError, run_ranks
from megatron_pp.parity.recorder import PARAMETER, Record, Recorder
from megatron_pp.plan.gc_pause import collector_paused

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


@dataclass(frozen=True)
class _Run:
    """``engine``: None for one process. ``restored``: folder of a checkpoint."""

    layout: Layout
    engine: str | None
    dtype: str
    restored: str = ""


@dataclass
class Runs:
    """Runs of one program, each done once. ``folder`` holds their files."""

    program: Program
    folder: Path
    done: dict[_Run, list[Record]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def layout(self, layout: Layout, engine: str, dtype: str) -> list[Record]:
        """The record of each rank, in "float32" or "float64"; of those that restore a checkpoint, where the layout has
        one. Raises RunError."""
        self.alone(layout, dtype)
        if not layout.checkpoint:
            return self._run(_Run(layout, engine, dtype))
        whole = _Run(layout.alone(), None, dtype)
        parts = _Run(replace(layout, checkpoint=SAVE), engine, dtype)  # the same run for all that is done with it
        writer = whole if layout.checkpoint == RESTORE else parts
        self._run(writer)
        return self._run(replace(whole if layout.checkpoint == SAVE else parts, restored=self._file(writer)))

    def alone(self, layout: Layout, dtype: str) -> Record:
        """Of one process that computes the same as ``layout``. It goes on where others end and begin again; up to the
        optimizer's next step if its state is not restored."""
        record = self._run(_Run(layout.alone(), None, dtype))[0]
        if not layout.checkpoint:
            return record
        begin = self.program.steps
        values = {key: value for key, value in record.values.items() if key.step >= begin}
        if layout.flags.having(NO_OPTIMIZER):
            values = {key: value for key, value in values.items() if key.step == begin and key.kind != PARAMETER}
        return replace(record, values=values)

    def exact(self, layout: Layout) -> Record:
        """Of one process in float64; in float32 where the script cannot compute in that, which the notes say then."""
        if not self.notes:
            try:
                return self.alone(layout, "float64")
            except RunError as error:
                self.alone(layout, "float32")  # it cannot run at all
                self.notes.append(f"not compared in float64: {str(error).splitlines()[-1].strip()}")
        return self.alone(layout, "float32")

    def _file(self, what: object) -> str:
        return str(self.folder / f"file{abs(hash(what))}")

    def _run(self, run: _Run) -> list[Record]:
        if run not in self.done:
            folder = Path(tempfile.mkdtemp(dir=self.folder))
            weights = f"{self._file(run.layout.alone())}.npz"

            def body(rank: int) -> Record:
                return _train(self.program, run, weights, self._file(run))

            self.done[run] = run_ranks(body, run.layout.world, folder, self.program.deadline)
        return self.done[run]


def _train(program: Program, run: _Run, weights: str, saved: str) -> Record:
    """The body of a rank. ``saved``: folder of the checkpoint that it saves, if any."""
    import torch

    from megatron_pp.parity import batches

    torch.set_num_threads(1)
    if run.dtype == "float64":
        float64.compute_in_float64()
    if run.engine == OURS:
        program.plugin()
    steps, alone, words = program.steps, run.engine is None, run.layout.flags.words()
    first = at = 0
    if run.layout.checkpoint:
        at = steps
        if run.restored:
            first, steps = at, 2 * at
            words += ["--load", run.restored]
        else:
            steps = 2 * at if alone else at + 1  # it ends within its last step: that has not been saved
            words += ["--save", saved, "--save-interval", str(at)]
            _write_in_this_process()
    recorder = Recorder(steps, weights, alone, first, at)
    recorder.install()
    if has_training_loop():
        batches.install(run.layout.uneven_masks)
    with contextlib.suppress(SystemExit):
        program.load(program.script, words)()
    return recorder.finished()


def _write_in_this_process() -> None:
    """What writes a checkpoint reports through a queue of a spawned process, which would import the script again, and
    says how much memory it takes."""
    writer: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    writer._results_queue = Queue()
    writer.HAVE_PSUTIL, writer._process_memory = True, lambda: 0


def prepare(program: Program) -> None:
    """Import what the script imports, so that ranks, which are forked, need not; without a GPU, on the CPU stand-in.
    Raises RunError where Megatron-core is missing."""
    sys.path.insert(0, os.getcwd() if program.module else str(Path(program.script).resolve().parent))
    if not program.gpu:
        from megatron_pp.parity import cpu_layers, cpu_stand_in

        vars(typing).setdefault("override", lambda function: function)  # Megatron's main branch needs Python 3.12
        cpu_stand_in.redirect()
        with cpu_stand_in.triton_stand_in():
            _import_all(program)
        cpu_layers.complete_layers()
        cpu_stand_in.allow_no_gpu()
    else:
        _import_all(program)


def has_training_loop() -> bool:
    """Whether the prepared program trains by Megatron's own loop, and not by one of its own on Megatron-core alone."""
    return "megatron.training.training" in sys.modules


@collector_paused()
def _import_all(program: Program) -> None:
    names = ["megatron.core.pipeline_parallel.schedules", "megatron.core.optimizer"]
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
    gc.freeze()  # ranks need not look through it either

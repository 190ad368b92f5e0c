"""One run of a training script under a layout: its processes, and what they recorded."""

from __future__ import annotations

import ast
import functools
import gc
import importlib.util
import logging
import os
import sys
import tempfile
import typing
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Queue
from typing import Any

from megatron_pp.common.gc_pause import collector_paused
from megatron_pp.integrations.on_import import WhenImported
from megatron_pp.tools.parity import float64
from megatron_pp.tools.parity.layout import NO_OPTIMIZER, RESTORE, SAVE, Layout
from megatron_pp.tools.parity.processes import RunError, run_ranks
from megatron_pp.tools.parity.recorder import PARAMETER, TRAINING_LOOP, Record, Recorder

MEGATRON, OURS = "megatron", "ours"


@dataclass(frozen=True)
class Program:
    """The training script, and how a run of it is made."""

    script: str
    module: bool
    steps: int
    deadline: float
    gpu: bool
    load: Any  # megatron_pp.tools.cli.run's load_script or load_module
    plugin: Any = None  # what installs our engine
    loop: bool = False  # Megatron's own training loop makes its steps, from data that `batches` replaces


@dataclass(frozen=True)
class _RunOfProgram:
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
    done: dict[_RunOfProgram, list[Record]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def layout(self, layout: Layout, engine: str, dtype: str) -> list[Record]:
        """The record of each rank, in "float32" or "float64"; of those that restore a checkpoint, where the layout has
        one. Raises RunError."""
        self.alone(layout, dtype)
        if not layout.checkpoint:
            return self._run(_RunOfProgram(layout, engine, dtype))
        whole = _RunOfProgram(layout.alone(), None, dtype)
        parts = _RunOfProgram(
            replace(layout, checkpoint=SAVE), engine, dtype
        )  # the same run for all that is done with it
        writer = whole if layout.checkpoint == RESTORE else parts
        self._run(writer)
        return self._run(replace(whole if layout.checkpoint == SAVE else parts, restored=self._file(writer)))

    def alone(self, layout: Layout, dtype: str) -> Record:
        """Of one process that computes the same as ``layout``. It goes on where others end and begin again; up to the
        optimizer's next step if its state is not restored."""
        record = self._run(_RunOfProgram(layout.alone(), None, dtype))[0]
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

    def dropout(self) -> bool:
        """Whether a model had some, which has been switched off."""
        return any(record.dropout for records in self.done.values() for record in records)

    def uncompared(self) -> list[str]:
        """What was recorded and could not be compared, in words."""
        found = {name: why for records in self.done.values() for one in records for name, why in one.uncompared.items()}
        return [f"not compared: {why}" for why in found.values()]

    def _file(self, what: object) -> str:
        return str(self.folder / f"file{abs(hash(what))}")

    def _run(self, run: _RunOfProgram) -> list[Record]:
        if run not in self.done:
            folder = Path(tempfile.mkdtemp(dir=self.folder))
            weights = f"{self._file(run.layout.alone())}.npz"

            def body(rank: int) -> Record:
                return _train(self.program, run, weights, self._file(run))

            try:
                self.done[run] = run_ranks(body, run.layout.world, folder, self.program.deadline)
            except RunError as error:
                raise RunError(f"{_words(run)}: {error}") from error
        return self.done[run]


def _words(run: _RunOfProgram) -> str:
    if run.engine is None:
        return "in one process"
    schedule = "this engine's" if run.engine == OURS else "Megatron's"
    return f"under {run.layout.label() or 'one process'}, {schedule} schedule"


def _train(program: Program, run: _RunOfProgram, weights: str, saved: str) -> Record:
    """The body of a rank. ``saved``: folder of the checkpoint that it saves, if any."""
    import torch

    from megatron_pp.tools.parity import batches

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
    dropout = run.layout.flags.text("--hidden-dropout", "0") not in ("0", "0.0")
    recorder = Recorder(steps, weights, alone, first, at, program.loop, dropout)
    recorder.install()
    if program.loop:
        WhenImported((TRAINING_LOOP,), functools.partial(batches.install, run.layout.uneven_masks))
    _run_script(program, words, recorder)
    return recorder.finished()


def _run_script(program: Program, words: list[str], recorder: Recorder) -> None:
    """Up to the recorder's last step; how the script ends then does not matter. Raises RunError where it exits before,
    and what it raises."""
    process = os.getpid()
    try:
        program.load(program.script, words)()
    except BaseException as error:
        if os.getpid() != process:  # a process that the script has forked
            raise
        if recorder.step >= recorder.steps:
            return
        if isinstance(error, SystemExit):
            raise RunError(recorder.words(exit_in_words(error))) from None
        raise


def exit_in_words(ended: SystemExit) -> str:
    """What `sys.exit` was given; a text is what Python prints."""
    if ended.code is None or isinstance(ended.code, int):
        return f"the script ended with exit code {ended.code or 0}"
    return f"the script ended with exit code 1 ({ended.code})"


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
    with _quiet_libraries():
        if program.gpu:
            _import_all(program)
        else:
            _import_on_cpu(program)


def _import_on_cpu(program: Program) -> None:
    from megatron_pp.tools.parity import cpu_layers, cpu_stand_in, hybrid_layers

    vars(typing).setdefault("override", lambda function: function)  # Megatron's main branch needs Python 3.12
    cpu_stand_in.redirect()
    with cpu_stand_in.triton_stand_in(), hybrid_layers.mamba_stand_in():
        _import_all(program)
    cpu_layers.complete_layers()
    hybrid_layers.complete_hybrid_layers()
    cpu_stand_in.allow_no_gpu()


@collector_paused()
def _import_all(program: Program) -> None:
    """An import that fails is left to the ranks: there it may succeed, or is the script's own error."""
    names = ["megatron.core.pipeline_parallel.schedules", "megatron.core.optimizer"]
    names += ["megatron_pp.integrations.megatron_core", *_imported_names(_file_of(program))]
    process = os.getpid()
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # of what is optional
        except (Exception, SystemExit) as error:
            print(f"parity: importing {name}: {type(error).__name__}: {error}", file=sys.stderr)
        if os.getpid() != process:
            os._exit(0)  # forked by that module
    gc.freeze()  # ranks need not look through it either


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """What they warn of as they are imported, such as packages that they miss, is not shown between the lines of the
    command; with ``PYTHONWARNINGS=default`` it is."""
    if sys.warnoptions:
        yield
        return
    before = logging.root.manager.disable
    with warnings.catch_warnings(record=True):  # also where a library sets filters of its own
        logging.disable(max(before, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(before)


def _file_of(program: Program) -> str:
    if not program.module:
        return program.script
    try:
        spec = importlib.util.find_spec(program.script)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{program.script}.__main__")
    except (Exception, SystemExit):
        return ""  # the ranks will say what is wrong with it
    return (spec and spec.origin) or ""


def _imported_names(path: str) -> list[str]:
    """Modules that a script imports at its top, and what it imports of Megatron anywhere: without a GPU only this
    process can. Raises RunError where it is no Python."""
    if not path.endswith(".py") and not Path(path).is_file():
        return []
    try:
        tree = ast.parse(Path(path).read_bytes(), path)
    except SyntaxError as error:
        raise RunError(f"{path}, line {error.lineno}: SyntaxError: {error.msg}") from error
    except ValueError as error:
        raise RunError(f"{path}: {error}") from error
    below = [node for node in ast.walk(tree) if node not in tree.body]
    return [*_names_of(tree.body), *(name for name in _names_of(below) if name.partition(".")[0] == "megatron")]


def _names_of(nodes: Iterable[ast.AST]) -> list[str]:
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    return names

"""Runs a training script under a layout, and returns the records of its processes."""

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
from megatron_pp.tools.parity.cpu import float64
from megatron_pp.tools.parity.layout import NO_OPTIMIZER, RESTORE, SAVE, Layout
from megatron_pp.tools.parity.records.recorder import PARAMETER, TRAINING_LOOP, Record, Recorder
from megatron_pp.tools.parity.workers.processes import RunError, run_ranks

MEGATRON = "megatron"
OURS = "ours"


@dataclass(frozen=True)
class Program:
    """The training script, and the settings of its runs."""

    script: str
    module: bool
    steps: int
    deadline: float
    gpu: bool
    load: Any  # megatron_pp.tools.cli.run's load_script or load_module
    plugin: Any = None  # a function that installs this engine
    loop: bool = False  # Megatron's own training loop makes the steps; `batches` replaces its data


@dataclass(frozen=True)
class _RunOfProgram:
    """One run. ``engine`` is None for one process. ``restored`` is the folder of a checkpoint that it restores."""

    layout: Layout
    engine: str | None
    dtype: str
    restored: str = ""


@dataclass
class Runs:
    """The runs of a program. Each run is made only once. ``folder`` is for their files."""

    program: Program
    folder: Path
    done: dict[_RunOfProgram, list[Record]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def layout(self, layout: Layout, engine: str, dtype: str) -> list[Record]:
        """The record of each rank, in "float32" or "float64". If the layout has a checkpoint, they are the records of
        the run that restores it. Raises RunError."""
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
        """The record of one process that computes the same as ``layout``. With a checkpoint, this process continues
        where other runs end and begin again. If the optimizer's state is not restored, the record ends before its next
        step."""
        record = self._run(_RunOfProgram(layout.alone(), None, dtype))[0]
        if not layout.checkpoint:
            return record
        begin = self.program.steps
        values = {key: value for key, value in record.values.items() if key.step >= begin}
        if layout.flags.having(NO_OPTIMIZER):
            values = {key: value for key, value in values.items() if key.step == begin and key.kind != PARAMETER}
        return replace(record, values=values)

    def exact(self, layout: Layout) -> Record:
        """The record of one process in float64. If the script cannot compute in float64, the record is in float32, and
        a note says so."""
        if not self.notes:
            try:
                return self.alone(layout, "float64")
            except RunError as error:
                self.alone(layout, "float32")  # raises if the script does not run in float32 either
                self.notes.append(f"not compared in float64: {str(error).splitlines()[-1].strip()}")
        return self.alone(layout, "float32")

    def dropout(self) -> bool:
        """Whether a model had dropout, which was switched off."""
        return any(record.dropout for records in self.done.values() for record in records)

    def uncompared(self) -> list[str]:
        """Sentences about recorded values that cannot be compared."""
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
    """Runs the script on one rank. ``saved`` is the folder for a checkpoint that it may save."""
    import torch

    from megatron_pp.tools.parity import batches

    torch.set_num_threads(1)
    if run.dtype == "float64":
        float64.compute_in_float64()
    if run.engine == OURS:
        program.plugin()
    steps = program.steps
    alone = run.engine is None
    words = run.layout.flags.words()
    first = at = 0
    if run.layout.checkpoint:
        at = steps
        if run.restored:
            first = at
            steps = 2 * at
            words += ["--load", run.restored]
        else:
            # A run ends within its last step, before it could save; so it makes one step more than it saves.
            steps = 2 * at if alone else at + 1
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
    """Runs the script up to the recorder's last step; its end after that does not matter. Raises RunError if the script
    exits earlier, and the script's own exception if it raises."""
    process = os.getpid()
    try:
        program.load(program.script, words)()
    except BaseException as error:
        if os.getpid() != process:  # the script forked this process
            raise
        if recorder.step >= recorder.steps:
            return
        if isinstance(error, SystemExit):
            raise RunError(recorder.words(exit_in_words(error))) from None
        raise


def exit_in_words(ended: SystemExit) -> str:
    """The end of a script by `sys.exit`, in words."""
    if ended.code is None or isinstance(ended.code, int):
        return f"the script ended with exit code {ended.code or 0}"
    return f"the script ended with exit code 1 ({ended.code})"


def _write_in_this_process() -> None:
    """Makes Megatron's writer of checkpoints use a queue of this process. Its own queue needs a spawned process, which
    would import the script again. Also turns off its reports of memory."""
    writer: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    writer._results_queue = Queue()
    writer.HAVE_PSUTIL = True
    writer._process_memory = lambda: 0


def prepare(program: Program) -> None:
    """Imports the modules that the script imports, so that forked ranks need not import them. Without a GPU, it uses
    the CPU stand-in. Raises RunError if the script cannot be parsed."""
    sys.path.insert(0, os.getcwd() if program.module else str(Path(program.script).resolve().parent))
    with _quiet_libraries():
        if program.gpu:
            _import_all(program)
        else:
            _import_on_cpu(program)


def _import_on_cpu(program: Program) -> None:
    from megatron_pp.tools.parity import cpu_stand_in
    from megatron_pp.tools.parity.cpu import cpu_layers, hybrid_layers

    vars(typing).setdefault("override", lambda function: function)  # Megatron's main branch needs Python 3.12
    cpu_stand_in.redirect()
    with cpu_stand_in.triton_stand_in(), hybrid_layers.mamba_stand_in():
        _import_all(program)
    cpu_layers.complete_layers()
    hybrid_layers.complete_hybrid_layers()
    cpu_stand_in.allow_no_gpu()


@collector_paused()
def _import_all(program: Program) -> None:
    """Imports the modules. A failed import is left to the ranks: there it may succeed, or is the script's own error."""
    names = ["megatron.core.pipeline_parallel.schedules", "megatron.core.optimizer"]
    names += ["megatron_pp.integrations.megatron_core", *_imported_names(_file_of(program))]
    process = os.getpid()
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # the module is optional
        except (Exception, SystemExit) as error:
            print(f"parity: importing {name}: {type(error).__name__}: {error}", file=sys.stderr)
        if os.getpid() != process:
            os._exit(0)  # the module forked this process
    gc.freeze()  # so that ranks do not collect these objects


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """A context that hides warnings of libraries during imports, such as those about missing packages. With
    ``PYTHONWARNINGS=default`` they are shown."""
    if sys.warnoptions:
        yield
        return
    before = logging.root.manager.disable
    with warnings.catch_warnings(record=True):  # also if a library sets its own filters
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
        return ""  # the ranks will report the error
    return (spec and spec.origin) or ""


def _imported_names(path: str) -> list[str]:
    """The modules that a script imports at its top level, and modules of Megatron that it imports anywhere: without a
    GPU only this process can import them. Raises RunError if the file is not Python."""
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

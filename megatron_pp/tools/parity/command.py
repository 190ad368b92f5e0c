"""`megatron-pp parity`: runs a script under its layout and as one process, compares them, and finds the fault."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_pp.tools.flags.flags import Flags
from megatron_pp.tools.parity.answers.answer import Answer
from megatron_pp.tools.parity.answers.comparison import (
    FAR_OFF,
    FLOAT32,
    FLOAT64,
    Comparison,
    compare_records,
    same_bits,
)
from megatron_pp.tools.parity.answers.diagnosis import smallest
from megatron_pp.tools.parity.answers.verdicts import DIFFERENT, EQUAL, ORDER
from megatron_pp.tools.parity.exercise import DROPOUT, not_exercised, refuse
from megatron_pp.tools.parity.layout import Layout, fewest_processes
from megatron_pp.tools.parity.runs import MEGATRON, OURS, Program, Runs, prepare
from megatron_pp.tools.parity.script import Seen, canonical, examine
from megatron_pp.tools.parity.script import refuse as refuse_usage
from megatron_pp.tools.parity.shrink import NEEDS_GPU, PRECISION, for_parity
from megatron_pp.tools.parity.workers.keeper import Workplace
from megatron_pp.tools.parity.workers.processes import RunError

ENGINES = {"both": (MEGATRON, OURS), "megatron": (MEGATRON,), "ours": (OURS,)}


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    script: str
    arguments: list[str]
    module: bool = False
    nproc: int | None = None
    shrink: bool = True
    engine: str = "both"
    steps: int = 2
    uneven_masks: bool = True
    deadline: float = 120.0
    checkpoints: tuple[str, ...] = ()  # values of layout.CHECKPOINTS


def answer(
    options: Options, load: Any, plugin: Callable[[], None], say: Callable[[str], None], place: Workplace
) -> Answer:
    """The answer of the comparison. ``say`` gets a text before each run. Raises RunError if a necessary run fails, does
    not end, or cannot begin."""
    layout = asked_for(options)
    gpus = _gpus()
    gpu = gpus >= layout.world
    program = Program(options.script, options.module, options.steps, options.deadline, gpu, load, plugin)
    say("importing")
    prepare(program)
    place.prepared()
    say("reading flags, checking sizes")
    program, layout, seen = examined(program, layout, options, place.folder)
    if options.checkpoints and not program.loop:
        raise RunError("checkpoints are compared with Megatron's own training loop only")
    engines = ENGINES[options.engine]
    answers = []
    runs = Runs(program, place.folder)
    for checkpoint in options.checkpoints or ("",):
        asked = replace(layout, checkpoint=checkpoint)
        asked, changed = _for_parity(asked, options, program, seen)
        compared, same = compare_engines(runs, asked, engines, say)
        script = [*(["-m"] if options.module else []), options.script]
        answers.append(Answer(script, asked, changed, compared, notes=list(runs.notes), same=same))
    result = max(answers, key=lambda one: ORDER.index(one.verdict))
    result.checkpoints = {one.layout.checkpoint: one.verdict for one in answers if one.layout.checkpoint}
    result.not_exercised = not_exercised(layout.flags, result.layout.flags, NEEDS_GPU)
    if program.loop or runs.dropout():
        result.not_exercised["dropout"] = DROPOUT
    result.notes += [f"{name}: compared in float32" for name in layout.flags.having(PRECISION)]
    result.notes += runs.uncompared()
    if 0 < gpus < layout.world:
        result.notes.append(f"{gpus} GPUs for {layout.world} processes: all ran on the CPU")
    result.engine = next((one for one in engines if result.compared[one].verdict == DIFFERENT), engines[0])
    if result.verdict == DIFFERENT:
        engine = result.engine

        def compare_again(other: Layout) -> Comparison:
            return check_recomputation(runs, other, engine, compare_exactly(runs, other, engine, say))

        result.smallest = smallest(result.layout, result.compared[engine], compare_again)
    return result


def examined(program: Program, layout: Layout, options: Options, folder: Path) -> tuple[Program, Layout, Seen]:
    """The program with the properties of its script, and the layout with the flags by the names that parity knows.

    Raises RunError for flags that the script does not understand, and for sizes that it refuses although it accepts the
    small ones.
    """

    def examine_with(shrunk: bool, layout: Layout) -> Seen:
        def flags(seen: Seen) -> Flags:
            own = replace(layout, flags=canonical(layout.flags, seen.options))
            return _for_parity(own, replace(options, shrink=shrunk), program, seen)[0].flags

        here = Path(tempfile.mkdtemp(dir=folder))
        schedule = options.engine != OURS
        return examine(program.script, program.load, flags, layout.world, here, program.deadline, schedule)

    seen = examine_with(False, layout)
    refuse_usage(seen)
    flags = canonical(layout.flags, seen.options)
    if flags != layout.flags:
        layout = asked_for(replace(options, arguments=flags.words()))
        seen = examine_with(False, layout)
    if seen.error and options.shrink:
        small = examine_with(True, layout)
        if not small.error:
            raise RunError(f"the script refuses the sizes that it is given: {seen.error}")
        seen.loop |= small.loop
    return replace(program, loop=seen.loop), layout, seen


def _for_parity(layout: Layout, options: Options, program: Program, seen: Seen) -> tuple[Layout, list[str]]:
    own_loop = not seen.megatrons_parser
    return for_parity(layout, options.steps, options.shrink, program.gpu, own_loop, seen.options)


def compare_engines(
    runs: Runs, layout: Layout, engines: tuple[str, ...], say: Callable[[str], None]
) -> tuple[dict[str, Comparison], bool | None]:
    """The comparison of each engine with one process, and whether two engines compute the same bits. If so, their
    comparisons are equal, and the second engine is not run in float64."""
    found = Comparison()
    same = None
    compared: dict[str, Comparison] = {}
    for engine in engines:
        say(f"{layout.label() or 'one process'}, schedule: {engine}")
        if compared:
            same = same_bits(*(runs.layout(layout, one, "float32") for one in (engines[0], engine)))
        found = found if same else compare(runs, layout, engine, say)
        compared[engine] = check_recomputation(runs, layout, engine, found)
    return compared, same


def compare(runs: Runs, layout: Layout, engine: str, say: Callable[[str], None]) -> Comparison:
    """The comparison in float32. If it is not equal to the bit, a run in float64 separates faults from rounding. A
    difference that does not occur in float64 is a fault only if it is very large in float32."""
    alone = runs.alone(layout, "float32")
    exact = runs.exact(layout)
    records = runs.layout(layout, engine, "float32")
    found = compare_records(records, alone, exact)
    if found.verdict == EQUAL or runs.notes:
        return found
    precise = compare_exactly(runs, layout, engine, say)
    return precise if precise.verdict == DIFFERENT else compare_records(records, alone, exact, FAR_OFF)


def check_recomputation(runs: Runs, layout: Layout, engine: str, found: Comparison) -> Comparison:
    """The comparison, with a fault if a recomputation with dropout uses other random numbers than its forward."""
    recomputed = "recomputation" in layout.parts() and not layout.checkpoint
    if found.verdict != DIFFERENT and recomputed and runs.program.loop:
        flags = layout.flags.with_values(attention_dropout=0.1, hidden_dropout=0.1)
        records = runs.layout(replace(layout, flags=flags), engine, "float32")
        names = sorted({name for record in records for name in record.unrepeated})
        unrepeated = [f"the recomputation of {name} does not repeat its forward, with dropout" for name in names]
        return replace(found, missing=found.missing + unrepeated)
    return found


def compare_exactly(runs: Runs, layout: Layout, engine: str, say: Callable[[str], None]) -> Comparison:
    """The comparison in float64; in float32 if the script cannot compute in float64."""
    dtype = "float32" if runs.notes else "float64"
    say(f"{layout.label() or 'one process'}, schedule: {engine}, {dtype}")
    exact = runs.exact(layout)
    unit = FLOAT32 if runs.notes else FLOAT64
    return compare_records(runs.layout(layout, engine, dtype), exact, exact, unit)


def asked_for(options: Options) -> Layout:
    """The layout that the options describe. Raises RunError if the number of processes does not fit the flags."""
    flags = Flags.read(options.arguments)
    refuse(flags)
    try:
        world = options.nproc or fewest_processes(flags)
        layout = Layout(flags, world, options.uneven_masks)
        least = layout.size("TP") * layout.size("PP") * layout.size("CP")
    except ValueError as error:
        raise RunError(f"a size among the script's flags is not a number: {error}") from error
    if world < least or world % least:
        raise RunError(f"--nproc {world} is not a multiple of TP x PP x CP = {least}")
    return layout


def _gpus() -> int:
    """The number of GPUs. CUDA is not initialised for it, because ranks could not use CUDA after a fork then."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0

"""The heading, summary and legend of a drawing, the same in every style."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from megatron_pp.tools.draw.palette import NAMES, OPERATIONS, Colour, block_colour
from megatron_pp.tools.draw.timeline import COLLECTIVES, COPIES, Timeline

SHADES = "shades"
IDLE = "idle"
WAIT = "wait"
ACTIVATION = "activation"
GRADIENT = "gradient"
MEMORY = "memory"
OFFLOADING = "offload"
LOADING = "load"
GATHERING = "gather"
REDUCING = "scatter"
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


class LegendEntry(NamedTuple):
    """An entry of the legend.

    kind     an operation; SHADES, which has no colour; or another name above, which is a colour of a Theme
    colours  the colours of an operation, from the first chunk to the last; empty for other kinds
    """

    kind: str
    label: str
    colours: tuple[Colour, ...] = ()


def name_in_words(num_chunks: int, sliced: bool = False) -> str:
    """An example of a block's name, with the meaning of its numbers."""
    words = "F3 microbatch 3" if num_chunks == 1 else "F1.3 chunk 1, microbatch 3"
    return f"{words}, s2 slice 2 of it" if sliced else words


def legend_entries(timelines: Sequence[Timeline]) -> list[LegendEntry]:
    """Every colour in the drawings, with its meaning."""
    entries = []
    for op in OPERATIONS:
        chunks = {(c, t.num_chunks) for t in timelines if op in t.ops for c in range(t.num_chunks)}
        shades = sorted(chunks, key=lambda one: one[0] / max(1, one[1] - 1))
        if shades:
            colours = tuple(dict.fromkeys(block_colour(op, *one) for one in shades))
            entries.append(LegendEntry(op, f"{op} {NAMES[op]}", colours))
    if any(t.num_chunks > 1 for t in timelines):
        entries.append(LegendEntry(SHADES, "lighter shades: later chunks"))
    entries.append(LegendEntry(IDLE, "idle"))
    if any(t.has_waits for t in timelines):
        entries.append(LegendEntry(WAIT, "waiting"))
    if any(t.has_transfers for t in timelines):
        entries += [LegendEntry(ACTIVATION, "activation in transfer"), LegendEntry(GRADIENT, "gradient in transfer")]
    if any(t.has_copies(*COPIES) for t in timelines):
        entries += [LegendEntry(OFFLOADING, "copy to host memory"), LegendEntry(LOADING, "copy back")]
    if any(t.has_copies(*COLLECTIVES) for t in timelines):
        entries += [LegendEntry(GATHERING, "all-gather (FSDP)"), LegendEntry(REDUCING, "reduce-scatter")]
    if any(t.most_memory for t in timelines):
        name = "memory" if timelines[0].memory_in_bytes else "activations kept, in microbatches"
        entries.append(LegendEntry(MEMORY, f"{name} (first rank to last)"))
    return entries


def costs_line(timelines: Sequence[Timeline]) -> str:
    """The times of compute and transfers: ``a microbatch on a rank takes F 1, B 2 slots; transfers take no time``."""
    unit = timelines[0].unit
    parts = []
    for op in OPERATIONS:
        times = [time for t in timelines for time in _times(t, op)]
        if times:
            parts.append(f"{op} {_range(times)}")
    lengths = [length for t in timelines if t.has_transfers for length in (t.traffic.shortest, t.traffic.longest)]
    sent = f"take {_range(lengths)} {unit}" if lengths else "take no time"
    what = "microbatch" if all(t.slices == 1 for t in timelines) else "microbatch, all its slices,"
    return f"a {what} on a rank takes {', '.join(parts)} {unit}; transfers {sent}"


def _times(timeline: Timeline, op: str) -> list[float]:
    """For each rank that runs ``op``: its mean time for one microbatch, with all its chunks and all slices."""
    times = []
    for lane in timeline.lanes:
        lengths = [e.end - e.start for e in lane.compute if e.instruction.op == op]
        if lengths:
            times.append(timeline.num_chunks * timeline.slices * sum(lengths) / len(lengths))
    return times


def _range(values: Sequence[float]) -> str:
    low = min(values)
    high = max(values)
    return short(low) if short(low) == short(high) else f"{short(low)} to {short(high)}"


def summary(timeline: Timeline) -> list[str]:
    """Step time, bubble, peak memory and transfers."""
    facts = [f"step {short(timeline.end)} {timeline.unit}", f"bubble {percent(timeline.bubble_share)}"]
    if timeline.most_memory:
        rank = max(range(len(timeline.lanes)), key=lambda r: timeline.lanes[r].peak)
        most = timeline.most_memory
        peak = size_label(most) if timeline.memory_in_bytes else counted(most, "microbatch", "es")
        facts.append(f"peak {peak} on {timeline.lanes[rank].name}")
    messages, size, *_ = timeline.traffic
    return [*facts, counted(messages, "transfer") + (f" of {size_label(size / messages)}" if size else "")]


def tick_step(span: float, most: int) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that gives no more than ``most`` steps over ``span``."""
    if span <= 0:
        return 1.0
    raw = span / max(1, most)
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))


def tick_label(value: float, step: float) -> str:
    """``value`` with as many decimals as ``step`` needs."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.{decimals}f}"


def size_label(value: float) -> str:
    """Bytes in the unit that keeps the number short."""
    for unit, size in _UNITS:
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}" if value < 1000 * size else f"{value / size:.0f} {unit}"
    return f"{value:.0f} B"


def value_ticks(most: float, in_bytes: bool) -> list[tuple[float, str]]:
    """Round values from 0 to ``most``, with their labels."""
    one = next((size for _, size in _UNITS if most >= size), 1) if in_bytes else 1
    step = tick_step(most / one, 4)
    values = [k * step for k in range(int(most / one / step + 1e-9) + 1)]
    labels = [size_label(value * one) if in_bytes else tick_label(value, step) for value in values]
    return [(value * one, label) for value, label in zip(values, labels, strict=True)]


def short(value: float) -> str:
    """The number with three significant digits; from 100 on, with all digits before the decimal point."""
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}" if abs(value) < 10_000 else f"{value:.0f}"


def counted(number: float, noun: str, plural: str = "s") -> str:
    """``1 transfer``, ``2000 transfers``. A number that is not whole is written by ``short``."""
    text = f"{number:.0f}" if number == int(number) else short(number)
    return f"{text} {noun}{'' if number == 1 else plural}"


def percent(share: float) -> str:
    """A share with one decimal."""
    return f"{share:.1%}"

"""The answer of a comparison of a layout with one process, as text and as the object that `--json` prints."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Any

from megatron_pp.tools.parity.answers.comparison import Comparison, Difference
from megatron_pp.tools.parity.answers.diagnosis import Smallest, ratio_in_words, ratios
from megatron_pp.tools.parity.answers.rounding import first_rounded
from megatron_pp.tools.parity.answers.verdicts import DIFFERENT, NOT_EXERCISED, ORDER, REPEAT, ROUNDING, SENTENCES
from megatron_pp.tools.parity.exercise import NOT_MADE
from megatron_pp.tools.parity.layout import Layout
from megatron_pp.tools.parity.records.recorder import (
    BUFFER,
    GRADIENT,
    LOGGED,
    NORM,
    PARAMETER,
    REPORT,
    RESTORED,
    RETURNED,
    SCHEDULE,
    ZEROS,
    is_state,
)

_SHOWN = 12
_CHANGES = 6
_OPERATIONS = {
    GRADIENT: "gradient after finalize_model_grads of {}",
    PARAMETER: "parameter after the optimizer step of {}",
    RESTORED: "restored value of {}",
    REPORT: "report of loss_func: {}",
    RETURNED: "return value of train_step: {}",
    LOGGED: "log of Megatron: {}",
    BUFFER: "buffer {} after the step",
    NORM: "{}",
    SCHEDULE: "{}",
    ZEROS: "{}",
}
_WHOSE = {
    "megatron": "Megatron's schedule",
    "ours": "this engine's schedule",
    "model": "outside the schedule: Megatron's layers or your script",
}


def _when(kind: str) -> int | None:
    """The order in time of the values of parameters and buffers within a step; None for other kinds."""
    if is_state(kind):
        return 2
    return {RESTORED: 0, GRADIENT: 1, PARAMETER: 3, BUFFER: 4}.get(kind)


@dataclass
class Answer:
    """The answer of a comparison.

    compared       engine -> the comparison of the whole layout
    smallest       the smallest layout that differs; None if none does
    engine         the engine of the smallest layout
    checkpoints    use of a checkpoint -> its verdict
    same           whether both schedules computed the same bits; None if only one ran
    not_exercised  flag, or "dropout" -> the reason why it is not compared
    known_faults   the known faults that the flags have: name, what, change
    """

    script: list[str]
    layout: Layout
    changed: list[str]
    compared: dict[str, Comparison]
    smallest: Smallest | None = None
    engine: str = ""
    notes: list[str] = field(default_factory=list)
    checkpoints: dict[str, str] = field(default_factory=dict)
    same: bool | None = None
    not_exercised: dict[str, str] = field(default_factory=dict)
    known_faults: list[dict[str, str]] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        found = self.of_what_ran
        return NOT_EXERCISED if self.not_made and found != DIFFERENT else found

    @property
    def of_what_ran(self) -> str:
        """The verdict of the parts that ran; parts that did not run are ignored."""
        return max((one.verdict for one in self.compared.values()), key=ORDER.index)

    @property
    def not_made(self) -> list[str]:
        """The flags for data or steps that parallel code treats specially, but that did not run."""
        return [name for name in self.not_exercised if name in NOT_MADE]

    @property
    def comparison(self) -> Comparison:
        """The comparison that the answer describes: that of the smallest layout, otherwise the worst one."""
        if self.smallest is not None:
            return self.smallest.comparison
        return max(self.compared.values(), key=lambda one: ORDER.index(one.verdict))

    @property
    def whose(self) -> str | None:
        """The source of the difference: "megatron" or "ours" if only that schedule differs; "model" if both differ, so
        that it is in code that both call; None if it is not known."""
        differing = [engine for engine, one in self.compared.items() if one.verdict == DIFFERENT]
        if len(self.compared) < 2 or not differing:
            return None
        return "model" if len(differing) == len(self.compared) else differing[0]

    @property
    def repeat(self) -> str | None:
        """A command that runs the smallest layout that differs."""
        if self.smallest is None:
            return None
        layout = self.smallest.layout
        options = ["--shrink", "none", "--nproc", str(layout.world), "--engine", self.engine]
        options += [] if layout.uneven_masks else ["--masks", "full"]
        options += ["--checkpoint", layout.checkpoint] if layout.checkpoint else []
        return shlex.join(["megatron-pp", "parity", *options, *self.script, *layout.flags.words()])

    def parameters(self) -> dict[str, dict[str, Any]]:
        """Parameter -> its fault in the first step with a wrong parameter. The fault is in the gradient; if all
        gradients are right, in the value after the step. Later values are wrong because of these."""
        start = self.comparison.first
        if start is not None and start.key.kind == NORM:  # the norm has the squares of some parameters wrongly
            ranks = [one.rank for one in self.comparison.wrong() if one.key == start.key]
            about = {"what": NORM, "ranks": ranks, "error": start.error, "allowed": start.allowed}
            return {name: dict(about) for name in self.comparison.of_norm}
        times = {one.key: (one.key.step, _when(one.key.kind)) for one in self.comparison.wrong()}
        wrong = [one for one in self.comparison.wrong() if times[one.key][1] is not None]
        if not wrong:
            return {}
        first = min(times[one.key] for one in wrong)
        named: dict[str, list[Difference]] = {}
        for one in wrong:
            if times[one.key] == first:
                named.setdefault(one.key.name, []).append(one)
        layout = self.smallest.layout if self.smallest else self.layout
        return {name: self._parameter(name, found, layout) for name, found in named.items()}

    def _parameter(self, name: str, found: list[Difference], layout: Layout) -> dict[str, Any]:
        about: dict[str, Any] = {
            "what": found[0].key.kind,
            "stages": sorted({one.stage for one in found if one.stage is not None}),
            "ranks": sorted({one.rank for one in found}),
            "error": max(one.error for one in found),
            "allowed": max(one.allowed for one in found),
        }
        ratio = None if found[0].key.kind in (PARAMETER, BUFFER) else ratios(found)  # their old values are in both
        if ratio is not None:
            about |= {"ratio": ratio, "ratio_in_words": ratio_in_words(ratio, layout)}
        if name in self.comparison.partial_sums:
            about["partial_sums"] = self.comparison.partial_sums[name]
        return about

    def first(self) -> dict[str, Any] | None:
        one = self.comparison.first
        if one is None:
            return {"operation": self.comparison.missing[0]} if self.comparison.missing else None
        key = one.key
        operation = _OPERATIONS.get(key.kind, f"{key.kind} of {{}}").format(key.name)
        about = {"operation": operation, "kind": key.kind, "name": key.name, "rank": one.rank, "step": key.step}
        about |= {"microbatch": key.microbatch} if key.microbatch >= 0 else {}
        ratio = None if key.kind in (PARAMETER, BUFFER) else one.ratio
        return {**about, "error": one.error, "allowed": one.allowed, "ratio": ratio}

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "first": self.first() if self.verdict == DIFFERENT else None,
            "parameters": self.parameters(),
            "dimension": self.smallest.dimension if self.smallest else None,
            "whose": self.whose,
            "whose_in_words": _WHOSE[self.whose] if self.whose else None,
            "known_faults": self.known_faults,
            "not_exercised": self.not_exercised,
            "rounding": self.rounding(),
            "repeat": self.repeat,
            "engines": {engine: one.verdict for engine, one in self.compared.items()},
            "same": self.same,
            "exact": self.comparison.exact_kinds(),
            "layout": self.layout.label(),
            "smallest": self.smallest.layout.label() if self.smallest else None,
            "checkpoints": self.checkpoints,
            "missing": self.comparison.missing,
            "compared": sum(len(one.differences) for one in self.compared.values()),
            "shrunk": self.changed,
            "notes": self.notes,
        }

    def lines(self) -> list[str]:
        """The lines of the answer. The verdict is the first."""
        label = self.layout.label() or "one process"
        if self.verdict == NOT_EXERCISED:
            lines = [f"{SENTENCES[NOT_EXERCISED]}: {', '.join(self.not_made)}"]
            lines += [
                f"  {name}: {self.not_exercised[name]}; without it parity compares the rest" for name in self.not_made
            ]
            lines.append(f"the parts that ran: {SENTENCES[self.of_what_ran]}: {label}")
        else:
            lines = [f"{SENTENCES[self.verdict]}: {label}"]
        lines += [f"  {_of(engine)} schedule: {_about(one)}" for engine, one in self.compared.items()]
        if self.same is not None:
            lines.append(f"  both schedules compute {'the same bits' if self.same else 'different bits'}")
        if self.verdict == DIFFERENT:
            lines += self._diagnosis()
        elif self.rounding():
            lines.append(f"  first sum in another order: {self.rounding()}")
        lines += [f"checkpoint, {what}: {SENTENCES[verdict]}" for what, verdict in self.checkpoints.items()]
        rest = {name: why for name, why in self.not_exercised.items() if name not in self.not_made}
        lines += [f"not exercised: {name}: {why}" for name, why in rest.items()]
        lines += [f"note: {note}" for note in self.notes]
        return [*lines, f"changed: {_folded(self.changed) or 'nothing'}"]

    def rounding(self) -> str | None:
        """The sum that has another order, if the layout differs only by rounding; otherwise None."""
        return first_rounded(self.comparison, self.layout) if self.of_what_ran == ROUNDING else None

    def _diagnosis(self) -> list[str]:
        first = self.first() or {}
        where = [f"{name} {first[name]}" for name in ("step", "microbatch", "rank") if name in first]
        lines = [f"first: {first.get('operation')} ({', '.join(where)})"]
        if first.get("ratio") is not None:
            layout = self.smallest.layout if self.smallest else self.layout
            lines[-1] += f", {ratio_in_words(first['ratio'], layout)}"
        if self.smallest is not None:
            lines.append(
                f"dimension: {self.smallest.dimension}; smallest layout that differs: {self.smallest.layout.label()}"
            )
        if self.whose is not None:
            lines.append(f"whose: {_WHOSE[self.whose]}")
        lines += [f"known fault: {one['name']}: {one['what']}; use {one['change']}" for one in self.known_faults]
        lines += grouped(self.parameters())
        lines += self.comparison.missing[:_SHOWN]
        return lines + ([f"{REPEAT}{self.repeat}"] if self.repeat else [])


def _of(engine: str) -> str:
    return "this engine's" if engine == "ours" else "Megatron's"


def _about(comparison: Comparison) -> str:
    exact = comparison.exact_kinds() if comparison.verdict == ROUNDING else []
    return SENTENCES[comparison.verdict] + (f"; to the last bit: {', '.join(exact)}" if exact else "")


def grouped(parameters: dict[str, dict[str, Any]]) -> list[str]:
    """A line for each group of parameters with the same fault."""
    groups: dict[str, list[str]] = {}
    for name, about in parameters.items():
        words = [about["what"], *([f"stages {_list(about['stages'])}"] if about.get("stages") else [])]
        words.append(f"ranks {_list(about['ranks'])}")
        words += [about["ratio_in_words"]] if "ratio" in about else []
        if "partial_sums" in about:
            words.append(f"partial sums: the gradients of the {about['partial_sums']} ranks add up to the right one")
        groups.setdefault("; ".join(words), []).append(name)
    return [f"{words}: {_some(names)}" for words, names in groups.items()]


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _folded(changed: list[str]) -> str:
    rest = len(changed) - _CHANGES
    return ", ".join(changed[:_CHANGES]) + (f" and {rest} more, which --json lists" if rest > 0 else "")


def _some(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")

"""What a benchmark found: rows with named columns, as JSON, as a text or Markdown table, and as a plot."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class BenchmarkError(RuntimeError):
    """A benchmark cannot run here; the message names what is missing."""


@dataclass
class Plot:
    """Lines of ``y`` over ``x``, one for each value of the ``line`` columns; one panel for each value of ``panel``."""

    x: str
    y: str
    line: Sequence[str]
    panel: Sequence[str] = ()
    target: float | None = None
    log_x: bool = False


@dataclass
class Report:
    """``columns`` are the columns that tables show, in order; ``rows`` may hold more, for the JSON."""

    name: str
    title: str
    columns: list[str]
    rows: list[Row]
    settings: Row = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    plot: Plot | None = None
    machine: Row = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.machine = self.machine or machine_facts()

    def text(self) -> str:
        """The table for a terminal, with what it was measured on."""
        cells = [self.columns] + [[shown(row.get(c)) for c in self.columns] for row in self.rows]
        widths = [max(len(line[k]) for line in cells) for k in range(len(self.columns))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([f"\n{self.title}", f"({self._circumstances()})", *lines, *self.notes])

    def markdown(self) -> str:
        """The table for a page of Markdown."""
        lines = [f"| {' | '.join(self.columns)} |", f"|{' --- |' * len(self.columns)}"]
        lines += [f"| {' | '.join(shown(row.get(c)) for c in self.columns)} |" for row in self.rows]
        return "\n".join([*lines, "", f"({self._circumstances()})", *(f"\n{note}" for note in self.notes)])

    def write(self, folder: Path) -> list[Path]:
        """Write JSON, text and, where there is a plot to draw and matplotlib to draw it, PNG."""
        folder.mkdir(parents=True, exist_ok=True)
        data, text = folder / f"{self.name}.json", folder / f"{self.name}.txt"
        data.write_text(json.dumps(asdict(self), indent=1, default=str) + "\n")
        text.write_text(self.text() + "\n")
        picture = draw(self, folder / f"{self.name}.png")
        return [data, text] + ([picture] if picture is not None else [])

    @classmethod
    def read(cls, path: Path) -> Report:
        raw = json.loads(path.read_text())
        plot = raw.pop("plot")
        return cls(**raw, plot=Plot(**plot) if plot else None)

    def _circumstances(self) -> str:
        facts = [f"{key} {value}" for key, value in {**self.settings, **self.machine}.items()]
        return ", ".join(facts)


def shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def machine_facts() -> Row:
    """The environment of the numbers. The load shows whether the machine was idle."""
    import torch

    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load at the end": round(os.getloadavg()[0], 1),
        "on": datetime.date.today().isoformat(),
    }


def draw(report: Report, path: Path) -> Path | None:
    plot = report.plot
    if plot is None:
        return None
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        report.notes.append("matplotlib is not installed: no plot")
        return None
    panels = _groups(report.rows, plot.panel)
    figure, all_axes = plt.subplots(1, len(panels), figsize=(5.5 * len(panels), 4), squeeze=False, sharey=True)
    for axes, (panel, rows) in zip(all_axes[0], panels.items(), strict=True):
        for line, points in _groups(rows, plot.line).items():
            points = sorted((p for p in points if p.get(plot.y) is not None), key=lambda p: p[plot.x])
            axes.plot([p[plot.x] for p in points], [p[plot.y] for p in points], marker="o", label=line)
        if plot.target is not None:
            axes.axhline(plot.target, linestyle=":", color="gray")
        axes.set_xscale("log" if plot.log_x else "linear")
        axes.set(xlabel=plot.x, ylabel=plot.y, title=panel)
        axes.legend(fontsize="small")
    figure.suptitle(report.title, fontsize="medium")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _groups(rows: list[Row], columns: Sequence[str]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(", ".join(str(row[c]) for c in columns), []).append(row)
    return groups

"""The results of a benchmark: rows with named columns. They are written as JSON, and as a table for a terminal or a
page."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class BenchmarkError(RuntimeError):
    """A benchmark cannot run here, or failed; the message says why."""


class NoDeviceError(BenchmarkError):
    """A benchmark needs a GPU, and this machine has none."""


@dataclass
class Report:
    """The results of one benchmark. ``columns``: the columns of its tables, by default all columns of the rows."""

    name: str
    title: str
    rows: list[Row]
    settings: Row = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    machine: Row = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.machine = self.machine or machine_facts()
        self.columns = self.columns or list(dict.fromkeys(column for row in self.rows for column in row))

    def text(self) -> str:
        """The table for a terminal, with the settings, versions and machine of the measurement."""
        cells = self.cells()
        widths = [max(len(line[k]) for line in cells) for k in range(len(self.columns))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([f"\n{self.title}", f"({self.circumstances()})", *lines, *self.notes])

    def cells(self) -> list[list[str]]:
        """The rows of the table for a page. The first one is the head."""
        return [self.columns, *([shown(row.get(c)) for c in self.columns] for row in self.rows)]

    def write(self, folder: Path) -> list[Path]:
        """Write NAME.json and NAME.txt."""
        data, text = files_of(self.name, folder)
        data.write_text(json.dumps(asdict(self), indent=1, default=str) + "\n")
        text.write_text(self.text() + "\n")
        return [data, text]

    @classmethod
    def read(cls, path: Path) -> Report:
        return cls(**json.loads(path.read_text()))

    def circumstances(self) -> str:
        """The settings, versions and machine of the measurement, in one line."""
        facts = [f"{key} {value}" for key, value in {**self.settings, **self.machine}.items()]
        return ", ".join(facts)


def add_options(parser: argparse.ArgumentParser, **options: Any) -> None:
    """Add options: ``forward_ms=(80.0, "help")`` adds ``--forward-ms`` with the type of its default. An option whose
    default is a list takes several values."""
    for name, given in options.items():
        default, text = given if isinstance(given, tuple) else (given, None)
        several: Row = (
            {"type": type(default[0]), "nargs": "+"} if isinstance(default, list) else {"type": type(default)}
        )
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, help=text, **several)


def numbers_of(args: argparse.Namespace) -> Row:
    """The options that are numbers, without the timeout. Reports record them as settings."""
    numbers = {name: value for name, value in vars(args).items() if type(value) in (int, float)}
    return {name.replace("_", " "): value for name, value in numbers.items() if name != "timeout"}


def files_of(name: str, folder: Path) -> list[Path]:
    """The paths of NAME.json and NAME.txt in the folder, which is made. Raises BenchmarkError if they cannot be
    written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchmarkError(f"--out {folder}: {error}") from error
    files = [folder / f"{name}.json", folder / f"{name}.txt"]
    for path in files:
        if path.exists() and not path.is_file():
            raise BenchmarkError(f"--out {folder}: {path} is not a file, so the report cannot be written")
    return files


def shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def machine_facts() -> Row:
    """The versions and the machine of a measurement. The load shows whether the machine was idle."""
    import torch

    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load at the end": round(os.getloadavg()[0], 1),
        "on": datetime.date.today().isoformat(),
    }

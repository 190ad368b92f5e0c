"""The outputs of a run for people: lines and a bar on the terminal, ``metrics.jsonl``, TensorBoard, a plot of the
loss."""

from __future__ import annotations

import json
import operator
import os
import resource
import sys
import textwrap
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from examples.gpt.errors import CheckpointError
from examples.gpt.files import write_atomically
from examples.gpt.settings import Settings
from megatron_pp.common.plain_files import read_plain
from megatron_pp.tools.advise.layers.gpus import GPUS

METRICS, TENSORBOARD, PLOT = "metrics.jsonl", "tensorboard", "loss.png"
_LARGEST = 1 << 28  # bytes of metrics


def peak_tflops(device: torch.device) -> float:
    """The device's peak TFLOPS for dense bf16; 0 if it is not known."""
    name = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else ""
    found = max((part for part in GPUS if part in name), key=len, default=None)
    return GPUS[found].flops / 1e12 if found else 0.0


def peak_memory_gib(device: torch.device) -> float:
    """The most GiB that this process has used so far: allocated by torch on a GPU, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux: KiB


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``, up to the first line that is cut short or has a value that is not a number.
    Raises CheckpointError if the file cannot be read."""
    records: list[dict[str, Any]] = []
    try:
        lines = read_plain(path, _LARGEST).decode(errors="replace").splitlines()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        for line in lines:
            record = json.loads(line)
            operator.index(record["step"])
            if not all(type(value) in (int, float) for value in record.values()):
                break
            records.append(record)
    return records


class Recorder:
    """Records the metrics on rank 0. On other ranks ``folder`` is None, and every method does nothing.

    Records of steps after ``done`` are dropped, because the continued run writes them again. The terminal shows a line
    every ``log_interval`` steps and after the last step. A bar below it has the remaining time."""

    def __init__(self, folder: Path | None, done: int, settings: Settings) -> None:
        self._file: Any = None
        self._board: Any = None
        self._bar: Any = None
        self._total, self._interval = settings.train_steps, settings.log_interval
        if folder is None:
            return
        path = folder / METRICS
        kept = [record for record in read_metrics(path) if record["step"] <= done] if os.path.lexists(path) else []
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = open(path, "a", buffering=1)  # noqa: SIM115  (closed by close)
        if settings.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(folder / TENSORBOARD), purge_step=done + 1)
            except ImportError as error:
                self.say(f"no TensorBoard files: {error}")
        if sys.stdout.isatty():
            with suppress(ImportError):
                from tqdm import tqdm

                steps = {"total": self._total, "initial": done, "unit": "step"}
                self._bar = tqdm(**steps, file=sys.stdout, dynamic_ncols=True, leave=False)

    def record(self, step: int, **values: float) -> None:
        """Record values after ``step`` steps: those of a training step, with a loss, or a validation_loss."""
        if self._file is None:
            return
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        if self._bar is not None and "loss" in values:
            self._bar.set_postfix_str(f"loss {values['loss']:.3f}", refresh=False)
            self._bar.update(step - self._bar.n)
        if "validation_loss" in values:
            self.say(f"step {step}: validation loss {values['validation_loss']:.3f}")
        elif step % self._interval == 0 or step == self._total:
            line = "loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s, bubble {bubble:.0%}, {peak_memory_gib:.2f} GiB"
            line += ", MFU {mfu:.1%}" if "mfu" in values else ""
            self.say(f"step {step}/{self._total}: {line.format(**values)}")

    def say(self, line: str) -> None:
        if self._file is not None:
            with self._bar.external_write_mode(file=sys.stdout) if self._bar is not None else nullcontext():
                print(line, flush=True)

    def close(self) -> None:
        for part in (self._file, self._board, self._bar):
            if part is not None:
                part.close()


def plot_loss(folder: Path, title: str) -> str | None:
    """Draw the losses in a run's folder. Returns ``None``, or why there is no plot: matplotlib is an extra."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no {PLOT}: {error}; install it in the project by pip install '.[viz]'"
    records = read_metrics(folder / METRICS)
    figure = Figure(layout="constrained")
    axes = figure.add_subplot(title=textwrap.fill(title, 60), xlabel="step", ylabel="nats per byte")
    axes.title.set_fontsize("medium")
    for name, kind, marker in (("loss", "training", ""), ("validation_loss", "validation", "o")):
        steps = [record["step"] for record in records if name in record]
        values = [record[name] for record in records if name in record]
        axes.plot(steps, values, linewidth=0.8, marker=marker, label=kind)
    axes.legend()
    figure.savefig(folder / PLOT, dpi=120)
    return None

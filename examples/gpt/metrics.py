"""What a run leaves for people to read: ``metrics.jsonl``, the progress bar, the loss plot."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from examples.gpt.errors import CheckpointError
from examples.gpt.files import open_plain, write_atomically

METRICS = "metrics.jsonl"
PLOT = "loss.png"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``, in order, up to a line that is none: a last one, cut short, for one.

    Raises:
        CheckpointError: the file cannot be read.
    """
    records: list[dict[str, Any]] = []
    try:
        with open_plain(path) as file:
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            break
        records.append(record)
    return records


class MetricsFile:
    """Appends one JSON object a line. Opening it drops what a continued run will write anew.

    Args:
        path: the file; made if missing.
        from_step: records of later steps than this are removed first.
    """

    def __init__(self, path: Path, from_step: int) -> None:
        kept = [record for record in read_metrics(path) if record["step"] <= from_step] if os.path.lexists(path) else []
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = open(path, "a", buffering=1)  # noqa: SIM115  (closed by close)

    def write(self, **record: Any) -> None:
        """Append one record; it is on its way to the disk when this returns."""
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Progress:
    """A progress bar on a terminal, and now and then a line elsewhere.

    Args:
        done, total: steps.
        interval: steps between two lines where there is no bar.
    """

    def __init__(self, done: int, total: int, interval: int) -> None:
        self._interval = interval
        self._total = total
        self._bar = _bar(done, total) if sys.stderr.isatty() else None

    def step(self, step: int, loss: float, tokens_per_second: float, bubble: float) -> None:
        """Show that ``step`` steps are done. ``bubble`` is a share between 0 and 1."""
        shown = f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s, bubble {bubble:.0%}"
        if self._bar is not None:
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update()
        elif step % self._interval == 0 or step == self._total:
            print(f"step {step}/{self._total}: {shown}", flush=True)

    def say(self, line: str) -> None:
        """Print a line without tearing the bar."""
        if self._bar is not None:
            self._bar.write(line)
        else:
            print(line, flush=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()


def _bar(done: int, total: int) -> Any:
    """tqdm's bar; ``None`` where tqdm, an extra of the package, is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, initial=done, unit="step", dynamic_ncols=True)


class Recorder:
    """Rank 0's metrics and progress; on other ranks (``folder`` is ``None``) every method does nothing.

    Args:
        folder: the run's folder.
        done, total: steps done already, and in all.
        interval: see :class:`Progress`.
    """

    def __init__(self, folder: Path | None, done: int, total: int, interval: int) -> None:
        self._metrics = MetricsFile(folder / METRICS, from_step=done) if folder else None
        self._progress = Progress(done, total, interval) if folder else None

    def training_step(self, step: int, *, loss: float, tokens_per_second: float, bubble: float, **more: float) -> None:
        """Note that ``step`` steps are done. ``bubble`` is the mean share of idle time over ranks, 0 to 1."""
        if self._metrics and self._progress:
            self._metrics.write(
                step=step, loss=loss, tokens_per_second=round(tokens_per_second, 1), bubble=round(bubble, 4), **more
            )
            self._progress.step(step, loss, tokens_per_second, bubble)

    def validation(self, step: int, loss: float) -> None:
        """Note the validation loss after ``step`` steps."""
        if self._metrics and self._progress:
            self._metrics.write(step=step, validation_loss=loss)
            self._progress.say(f"step {step}: validation loss {loss:.3f}")

    def saved(self, checkpoint: Path) -> None:
        """Note that a checkpoint has been written."""
        self.say(f"saved {checkpoint}")

    def say(self, line: str) -> None:
        """Tell people something."""
        if self._progress:
            self._progress.say(line)

    def close(self) -> None:
        """End the progress bar and close the file."""
        if self._metrics and self._progress:
            self._metrics.close()
            self._progress.close()


def plot_losses(metrics: Path, picture: Path) -> str | None:
    """Draw the losses of a ``metrics.jsonl`` as a PNG.

    Returns:
        ``None``, or why there is no picture (matplotlib is an extra of the package).
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no loss plot: {error}"
    records = read_metrics(metrics)
    training = [(record["step"], record["loss"]) for record in records if "loss" in record]
    validation = [(record["step"], record["validation_loss"]) for record in records if "validation_loss" in record]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if training:
        axes.plot(*zip(*training, strict=True), linewidth=0.8, label="training")
    if validation:
        axes.plot(*zip(*validation, strict=True), marker="o", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    if training or validation:
        axes.legend()
    figure.savefig(picture, dpi=120)
    return None

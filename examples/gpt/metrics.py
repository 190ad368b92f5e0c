"""What a run leaves for people to read: ``metrics.jsonl``, TensorBoard's files, and the progress bar."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from examples.gpt.errors import CheckpointError
from examples.gpt.files import open_plain, write_atomically

METRICS, TENSORBOARD = "metrics.jsonl", "tensorboard"
# Dense bf16, by a part of the device's name.
_PEAK_TFLOPS = {"B200": 2250.0, "H200": 989.0, "H100": 989.0, "A100": 312.0, "V100": 125.0}


def peak_tflops(device: torch.device) -> float | None:
    """What the device can compute at most, where it is known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in _PEAK_TFLOPS.items() if part in name), None)


def peak_memory_gib(device: torch.device) -> float:
    """The most that this process has used so far: allocated by torch on a GPU, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux: KiB


def flops_per_token(matmul_parameters: int, num_layers: int, hidden_size: int, seq_length: int) -> float:
    """Of a forward and a backward without recomputation (Chowdhery et al., 2204.02311, appendix B)."""
    return 6.0 * matmul_parameters + 12.0 * num_layers * hidden_size * seq_length


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``, in order, up to a line that is none: a last one, cut short, for one.

    Raises CheckpointError: the file cannot be read.
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


class Recorder:
    """Rank 0's metrics and progress; on other ranks (``folder`` is None) every method does nothing.

    What a continued run will write anew is dropped: records of steps later than ``done``. Without a terminal there is a
    line every ``interval`` steps instead of a bar.
    """

    def __init__(self, folder: Path | None, done: int, total: int, interval: int, tensorboard: bool = False) -> None:
        self._file: Any = None
        self._board: Any = None
        self._total, self._interval = total, interval
        if folder is None:
            return
        path = folder / METRICS
        kept = [record for record in read_metrics(path) if record["step"] <= done] if os.path.lexists(path) else []
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = open(path, "a", buffering=1)  # noqa: SIM115  (closed by close)
        self._bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, disable=None)
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(folder / TENSORBOARD), purge_step=done + 1)
            except ImportError as error:
                self.say(f"no TensorBoard files: {error}")

    def training_step(self, step: int, **values: float) -> None:
        """Note that ``step`` steps are done: loss, tokens_per_second, bubble (a share of time), peak_memory_gib, ..."""
        if self._file is None:
            return
        self._write(step, values)
        shown = "loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s, bubble {bubble:.0%}".format(**values)
        shown += f", MFU {values['mfu']:.1%}" if "mfu" in values else ""
        shown += f", {values['peak_memory_gib']:.2f} GiB"
        if not self._bar.disable:
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update()
        elif step % self._interval == 0 or step == self._total:
            self.say(f"step {step}/{self._total}: {shown}")

    def validation(self, step: int, loss: float) -> None:
        """Note the validation loss after ``step`` steps."""
        if self._file is not None:
            self._write(step, {"validation_loss": loss})
            self.say(f"step {step}: validation loss {loss:.3f}")

    def say(self, line: str) -> None:
        """Print a line, without tearing the bar."""
        if self._file is not None:
            tqdm.write(line)

    def close(self) -> None:
        """End the progress bar and close the files."""
        for part in (self._file, self._board, self._file and self._bar):
            if part is not None:
                part.close()

    def _write(self, step: int, values: dict[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            if self._board is not None:
                self._board.add_scalar(name, value, step)

"""Real text as byte tokens: reading it, splitting it, and handing out microbatches by number.

Nothing here keeps a position. Which sample a microbatch holds follows from the seed, the step and the place in the
grid alone, so every stage of a pipeline can make the same microbatch for itself, and a resumed run continues exactly.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from examples.gpt.errors import ArgumentError, DataPathError, TextTooShortError

VOCAB_SIZE = 256
"""Tokens are bytes."""

# Not part of every Python installation, or not the library itself.
_SKIPPED_LIBRARY_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}


def read_text(paths: Sequence[str], max_bytes: int) -> bytes:
    """Read at most ``max_bytes`` of text from files and folders, in a fixed order.

    Args:
        paths: files, taken as they are, and folders, of which all files are taken, sorted by path; hidden ones are
            left out.
            Empty: the source of Python's own standard library.
        max_bytes: where to stop.

    Raises:
        DataPathError: a path does not exist or cannot be read, or there is no text in any of them.
        ArgumentError: ``max_bytes`` is not positive.
    """
    if max_bytes < 1:
        raise ArgumentError(f"--max-data-bytes is {max_bytes}; it must be at least 1")
    files = [file for path in paths for file in _files_at(Path(path))] if paths else _library_files()
    text = bytearray()
    for file in files:
        if len(text) >= max_bytes:
            break
        try:
            with open(file, "rb") as source:
                text += source.read(max_bytes - len(text))
        except OSError as error:
            raise DataPathError(
                f"cannot read data file {file}: {error.strerror}; give readable files to --data"
            ) from error
    if not text:
        raise DataPathError(
            f"no text in {', '.join(map(str, paths)) or 'the standard library'}; all files are empty or there are none"
        )
    return bytes(text)


def _files_at(path: Path) -> list[Path]:
    if path.is_dir():
        if not os.access(path, os.R_OK | os.X_OK):
            raise DataPathError(f"cannot read data folder {path}: permission denied; give readable files to --data")
        return sorted(
            file
            for file in path.rglob("*")
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
        )
    if not path.exists():
        raise DataPathError(f"data path {path} does not exist; give existing files or folders to --data")
    if not path.is_file():
        # Every rank reads for itself, and a pipe gives its text to one reader only, or to none for ever.
        raise DataPathError(
            f"data path {path} is neither a file nor a folder; give existing files or folders to --data"
        )
    return [path]


def _library_files() -> list[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        file for file in folder.rglob("*.py") if not _SKIPPED_LIBRARY_FOLDERS & set(file.relative_to(folder).parts)
    )
    if not files:
        raise DataPathError(f"no Python source under {folder}; give a text of your own to --data")
    return files


def split_text(text: bytes, validation_fraction: float) -> tuple[Tensor, Tensor]:
    """Split into training and validation tokens, uint8, one dimension each; the validation part is the text's tail.

    Raises:
        ArgumentError: the fraction is not between 0 and 1.
    """
    if not 0.0 < validation_fraction < 1.0:
        raise ArgumentError(
            f"--validation-fraction is {validation_fraction}; it must lie between 0 and 1, such as 0.05"
        )
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = len(tokens) - int(len(tokens) * validation_fraction)
    return tokens[:cut], tokens[cut:]


@dataclass(frozen=True)
class BatchShape:
    """How one global batch is divided.

    Attributes:
        micro_batch_size: samples in a microbatch.
        num_microbatches: microbatches of one data-parallel replica in a step.
        data_parallel_size: replicas.
        seq_length: tokens in a sample.
    """

    micro_batch_size: int
    num_microbatches: int
    data_parallel_size: int
    seq_length: int

    @property
    def samples(self) -> int:
        """Samples in a global batch."""
        return self.micro_batch_size * self.num_microbatches * self.data_parallel_size

    @property
    def tokens(self) -> int:
        """Tokens in a global batch."""
        return self.samples * self.seq_length


class SampleOrder:
    """Samples of a text: windows of ``seq_length + 1`` tokens that overlap by one, in a shuffled order per epoch.

    Args:
        tokens: uint8, one dimension.
        shape: how a global batch is divided.
        seed: seed of the order; ``None`` keeps the text's order.
        name: what to call the text in messages.

    Raises:
        TextTooShortError: there are fewer samples than a global batch takes.
    """

    def __init__(self, tokens: Tensor, shape: BatchShape, seed: int | None, name: str) -> None:
        self.tokens = tokens
        self.shape = shape
        self.seed = seed
        self.num_samples = (len(tokens) - 1) // shape.seq_length
        if self.num_samples < shape.samples:
            raise TextTooShortError(
                f"the {name} text of {len(tokens)} bytes is too short for one batch of {shape.samples} samples of "
                f"{shape.seq_length} tokens; it takes at least {shape.tokens + 1} bytes: give more text, or make the "
                "sequence, the microbatches or their number smaller"
            )
        self._permutation = lru_cache(maxsize=2)(self._new_permutation)

    def microbatch(self, step: int, microbatch: int, data_parallel_rank: int) -> tuple[Tensor, Tensor]:
        """The tokens and labels, int64 ``[b, s]`` each, of one microbatch of step ``step`` (0-based)."""
        shape = self.shape
        first = (
            step * shape.samples + (microbatch * shape.data_parallel_size + data_parallel_rank) * shape.micro_batch_size
        )
        windows = torch.stack([self._window(first + i) for i in range(shape.micro_batch_size)]).long()
        return windows[:, :-1], windows[:, 1:]

    def step_iterator(
        self, step: int, data_parallel_rank: int, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """All microbatches of step ``step`` for one replica, in order, on ``device``."""
        for microbatch in range(self.shape.num_microbatches):
            tokens, labels = self.microbatch(step, microbatch, data_parallel_rank)
            yield tokens.to(device), labels.to(device)

    def _window(self, sample: int) -> Tensor:
        epoch, index = divmod(sample, self.num_samples)
        start = int(self._permutation(epoch)[index]) * self.shape.seq_length
        return self.tokens[start : start + self.shape.seq_length + 1]

    def _new_permutation(self, epoch: int) -> Tensor:
        if self.seed is None:
            return torch.arange(self.num_samples)
        # One odd multiplier keeps (seed, epoch) pairs apart without drawing from the global generator.
        generator = torch.Generator().manual_seed((self.seed * 0x9E3779B1 + epoch) % 2**63)
        return torch.randperm(self.num_samples, generator=generator)

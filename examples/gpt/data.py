"""Real text as byte tokens, in numbered microbatches.

The samples of a microbatch depend only on the seed, the step and its place in the step; no position is stored. So every
stage of a pipeline makes the same microbatch for itself, and a resumed run continues exactly.
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

from examples.gpt.errors import DataError

VOCAB_SIZE = 256  # tokens are bytes
Microbatch = tuple[int, Tensor, Tensor]  # (number in the run over all replicas, tokens, labels), both int64 [b, s]

_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
# Folders that are not part of every Python installation, or not of the library itself.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}


def read_text(paths: Sequence[str], max_bytes: int) -> bytes:
    """At most ``max_bytes`` of text from files and folders ``paths``. Files of a folder are sorted, without hidden
    ones. Without paths the text is the source of Python's standard library. Raises DataError if there is nothing to
    read."""
    text = bytearray()
    for file in [file for path in paths for file in _files_at(Path(path))] if paths else _library_files():
        if len(text) >= max_bytes:
            break
        try:
            with open(file, "rb") as source:
                text += source.read(max_bytes - len(text))
        except OSError as error:
            raise DataError(f"cannot read data file {file}: {error.strerror}; give others to --data") from error
    if not text:
        raise DataError(f"no text in {', '.join(map(str, paths)) or 'the standard library'}; give others to --data")
    return bytes(text)


def _files_at(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    # For example a pipe, which gives its text to one rank only.
    if not path.is_dir() or not os.access(path, os.R_OK | os.X_OK):
        raise DataError(f"data path {path} is not a file or a readable folder; give others to --data")
    files = sorted(path.rglob("*"))
    return [f for f in files if f.is_file() and not any(part[0] == "." for part in f.relative_to(path).parts)]


def _library_files() -> list[Path]:
    files: list[Path] = []
    for folder, folders, names in os.walk(_LIBRARY):
        folders[:] = set(folders) - _NOT_LIBRARY
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def split_text(text: bytes, validation_fraction: float) -> tuple[Tensor, Tensor]:
    """Training and validation tokens, both uint8 of one dimension. The validation part is the end of the text."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = len(tokens) - int(len(tokens) * validation_fraction)
    return tokens[:cut], tokens[cut:]


@dataclass
class SampleOrder:
    """Samples of a text: windows of ``seq_length + 1`` tokens that overlap by one, in a shuffled order per epoch.
    Raises DataError if the text, which is called ``name`` in the message, does not fill a global batch."""

    tokens: Tensor  # uint8, of one dimension
    micro_batch_size: int
    num_microbatches: int  # microbatches of one replica in a step
    data_parallel_size: int
    seq_length: int
    seed: int
    name: str

    def __post_init__(self) -> None:
        samples = self.micro_batch_size * self.num_microbatches * self.data_parallel_size
        self.tokens_per_step = samples * self.seq_length
        self.num_samples = (len(self.tokens) - 1) // self.seq_length
        if self.num_samples < samples:
            raise DataError(
                f"the {self.name} text of {len(self.tokens)} bytes is too short for one batch of {samples} samples of "
                f"{self.seq_length} tokens; it takes at least {self.tokens_per_step + 1} bytes: give more text"
            )
        self._permutation = lru_cache(maxsize=2)(self._new_permutation)

    def microbatch(self, number: int) -> tuple[Tensor, Tensor]:
        """The tokens and labels of one microbatch of the run, both int64 ``[b, s]``."""
        samples = range(number * self.micro_batch_size, (number + 1) * self.micro_batch_size)
        windows = torch.stack([self._window(sample) for sample in samples]).long()
        return windows[:, :-1], windows[:, 1:]

    def step_iterator(self, step: int, data_parallel_rank: int, device: torch.device) -> Iterator[Microbatch]:
        """All microbatches of step ``step`` (0-based) for one replica, in order, on ``device``."""
        replicas, per_replica = self.data_parallel_size, self.num_microbatches
        for microbatch in range(step * per_replica, (step + 1) * per_replica):
            number = microbatch * replicas + data_parallel_rank
            tokens, labels = self.microbatch(number)
            yield number, tokens.to(device), labels.to(device)

    def _window(self, sample: int) -> Tensor:
        epoch, index = divmod(sample, self.num_samples)
        start = int(self._permutation(epoch)[index]) * self.seq_length
        return self.tokens[start : start + self.seq_length + 1]

    def _new_permutation(self, epoch: int) -> Tensor:
        # An odd multiplier gives each (seed, epoch) its own seed. The global generator is not used.
        generator = torch.Generator().manual_seed((self.seed * 0x9E3779B1 + epoch) % 2**63)
        return torch.randperm(self.num_samples, generator=generator)

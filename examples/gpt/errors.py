"""What the training program raises on bad input, each with one sentence that says what would be right.

A number of processes that does not fit the grid is a :class:`megatron_pp.errors.WorldSizeError`. All of these
are raised on every rank before any communication, except for what one rank alone cannot know (a folder, or flags, that
nodes see differently) or what shows later (:class:`BrokenOffError`), which all ranks raise together.
"""

from __future__ import annotations

from megatron_pp.errors import ConfigError


class TrainingError(Exception):
    """Base of all errors the training program reports as one line, without a traceback."""


class ArgumentError(TrainingError, ConfigError):
    """A command-line value is impossible, or two contradict each other."""


class DataPathError(TrainingError, OSError):
    """A data path does not exist, cannot be read, or holds no text."""


class TextTooShortError(TrainingError, ValueError):
    """The text does not fill one global batch."""


class RunInUseError(TrainingError):
    """Another run works in the run's folder."""


class CheckpointError(TrainingError):
    """A checkpoint is incomplete, damaged, or of another version."""


class NoCheckpointError(CheckpointError):
    """There is no run, or no checkpoint, where one was to be."""


class BrokenOffError(TrainingError):
    """What was asked for is possible, but the run could not go on; not bad input."""


class CheckpointWriteError(CheckpointError, BrokenOffError):
    """A checkpoint could not be written: disk full, no permission. The former one stays."""


class CheckpointLayoutError(CheckpointError, ValueError):
    """A checkpoint belongs to another layout: other stages, layers or sizes."""


class NonFiniteLossError(BrokenOffError, ArithmeticError):
    """The loss or the gradient became infinite or not a number."""

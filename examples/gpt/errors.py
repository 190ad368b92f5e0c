"""Errors that the program reports in one line, without a traceback. ``exit_code`` is the process's exit code."""

from megatron_pp.errors import ConfigError, MegatronPPError


class TrainingError(MegatronPPError):
    """Base class. An error of this class itself is bad input. It is raised before any communication if one rank can
    detect it."""

    exit_code = 2


class ArgumentError(TrainingError, ConfigError):
    """A setting is impossible, or two contradict each other."""


class DataError(TrainingError, OSError):
    """A data path cannot be read, or the text is too short."""


class NonFiniteLossError(TrainingError):
    """The loss or the gradient became infinite or not a number."""

    exit_code = 1


class CheckpointError(TrainingError):
    """A checkpoint or a run to resume is damaged, incomplete, or of another version."""

    exit_code = 3


class NoCheckpointError(CheckpointError):
    """There is no run, or no checkpoint, at the given path."""

    exit_code = 2


class CheckpointLayoutError(NoCheckpointError):
    """The checkpoint belongs to other stages, layers or sizes."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written, for example to a full disk or without permission. The former one stays."""

    exit_code = 4


class RunInUseError(TrainingError):
    """Another run works in the run's folder."""

    exit_code = 5

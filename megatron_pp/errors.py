"""All public errors. A leaf: imports nothing from the package, and not torch.

Every class takes the message first and everything else by keyword with a default, so that an error survives pickling
with its attributes.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import InitVar, dataclass

__all__ = [
    "CommunicatorClosedError", "ConfigError", "FileFormatError", "FusedWeightGradError", "InstructionError",
    "LayoutError", "MegatronPPError", "MicrobatchCountError", "NotServedError", "P2PError", "P2PShapeError",
    "P2PTimeoutError", "P2PTransferError", "P2PTypeError", "ParallelStateError", "PipelineError",
    "PipelineMismatchError", "PipelinePeerError", "PipelineStallError", "PlanError", "ScheduleError",
    "ScheduleInputError", "SendBufferError", "UnknownMegatronError", "WeightGradError", "WeightGradSplitError",
    "WireMismatchError", "WorldSizeError",
]  # fmt: skip


def visible(text: str) -> str:
    """``text`` for a terminal. Characters that a terminal does not print as themselves, such as control characters in
    a file, are escaped. Ends of lines and tabs stay."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


class MegatronPPError(Exception):
    """The base of every error that this package raises. Its text is ``visible``, whatever it quotes."""

    def __str__(self) -> str:
        return visible(super().__str__())


@dataclass(eq=False, repr=False)
class PipelineError(MegatronPPError, RuntimeError):
    """The base of the errors that end a pipeline step and do not come from the user's code on this rank."""

    text: InitVar[str]

    def __post_init__(self, text: str) -> None:
        super().__init__(text)


@dataclass(eq=False, repr=False, kw_only=True)
class PipelinePeerError(PipelineError):
    """Another rank of the pipeline raised; this rank was stopped because of it, within seconds."""

    rank: int = -1  # pipeline rank that raised, -1 if unknown
    instruction: str = ""  # where it was in its plan, as printed (``F0.3``); empty before and after the plan
    exception_type: str = ""  # qualified name of the exception raised there, such as ``ValueError``
    message: str = ""  # its text
    traceback_tail: str = ""  # the last lines of its traceback


@dataclass(eq=False, repr=False, kw_only=True)
class PipelineStallError(PipelineError):
    """No rank made progress for ``p2p_timeout``, or a peer died or stopped: raised on the survivors, not a hang."""

    suspects: tuple[int, ...] = ()  # pipeline ranks that no longer report, or never entered the step
    progress: Mapping[int, str] = dataclasses.field(default_factory=dict)  # rank -> where it last was, and when


@dataclass(eq=False, repr=False, kw_only=True)
class PipelineMismatchError(PipelineError):
    """Ranks disagree on the plan or shapes at the entry of a step, or a tensor arrived that was not expected."""

    field: str = ""  # what differs, such as ``num_microbatches`` or ``dtype``
    values: Mapping[int, str] = dataclasses.field(default_factory=dict)  # pipeline rank -> its value, as text


class P2PError(PipelineError):
    """A send or a receive between two pipeline stages failed, or its arguments are wrong."""


class P2PTransferError(P2PError):
    """A transfer failed: its connection or its peer is gone. The fault guard looks for the reason on other ranks."""


class P2PTimeoutError(P2PTransferError):
    """A send or a receive did not complete in the time given to it."""


class P2PTypeError(P2PError, TypeError):
    """The value to send is not a tensor, or has the wrong dtype, device or layout for the channel."""


class P2PShapeError(P2PError, ValueError):
    """The shape of a tensor to send or receive is missing, malformed or not the one agreed."""


class CommunicatorClosedError(P2PTransferError):
    """The communicator was aborted or closed; make a new one (and process groups, if they were aborted with it)."""


class WireMismatchError(P2PError, PipelineMismatchError):
    """With ``p2p_debug``: a tensor arrived that the plan does not expect. ``values``: those of sender and receiver."""


@dataclass(eq=False, repr=False, kw_only=True)
class SendBufferError(P2PError):
    """A tensor was written to while it was being sent. With ``p2p_debug`` also: freed, swapped, or written to unseen by
    autograd."""

    rank: int = -1  # pipeline rank whose memory it is
    chunk: int = -1  # chunk of that rank, and
    microbatch: int = -1  # microbatch whose output or input gradient was being sent
    posted_by: str = ""  # the instruction that posted the send, as printed (``SEND_F0.3``)
    broken_by: str = ""  # the instruction during which the fault was found


class ScheduleInputError(PipelineError, ValueError):
    """An argument of a schedule is impossible. Raised before any communication."""


class ConfigError(MegatronPPError, ValueError):
    """A configuration value is impossible, or two contradict each other. Raised before any communication."""


class LayoutError(ConfigError):
    """Layers cannot be placed over the stages so that each is placed exactly once."""


class MicrobatchCountError(ConfigError):
    """The number of microbatches is not a whole number of at least 1."""


class ScheduleError(ConfigError):
    """The schedule is not known, or does not fit the number of model chunks or the placement."""


class WorldSizeError(ConfigError):
    """The number of processes does not fit the grid of parallel sizes."""


class PlanError(MegatronPPError, ValueError):
    """A plan cannot be built or was refused; the message names the rank, the instruction and what is missing."""


class FileFormatError(PlanError):
    """A file is malformed; the message names the place and what would be right."""


class InstructionError(MegatronPPError, ValueError):
    """A text is not an instruction; the message quotes it and names what would be right."""


class WeightGradError(MegatronPPError, RuntimeError):
    """B and W ran in an order that loses or repeats gradients; the message names the chunk and microbatch."""


class WeightGradSplitError(MegatronPPError, ValueError):
    """A model cannot be converted; the message names the module."""


class FusedWeightGradError(MegatronPPError, TypeError):
    """``main_grad`` has a dtype that no kernel adds into."""


class ParallelStateError(MegatronPPError, RuntimeError):
    """The parallel groups are used before they are made, or made twice."""


class NotServedError(MegatronPPError, NotImplementedError):
    """Under `install(strict=True)`: this step would have run on Megatron's own schedule."""


class UnknownMegatronError(MegatronPPError, RuntimeError):
    """Megatron-core is missing, too old, or has a signature that the plug-in does not know.

    The message names the version, the function and the parameter.
    """

"""The type, text and origin of an exception. Exceptions of user code may raise when they are inspected; such errors are
caught here, and no decision rests on the text of a user's exception."""

from __future__ import annotations

import dis
import re
import traceback
from collections.abc import Callable
from types import TracebackType

from torch.distributed import DistError

from megatron_pp.errors import P2PTransferError
from megatron_pp.faults.records import cut

_TRACEBACK_LINES = 12
# The place in gloo's source that raised it; one error has none.
_FROM_GLOO = re.compile(r"\[[^\]\n]*/gloo/[^\]\n]+:\d+\] |Application timeout caused pair closure")


def is_consequence(error: BaseException) -> bool:
    """Whether ``error`` means that a transfer failed, rather than why: our transport raised it, or a collective of
    torch.distributed, such as one that a user's model runs."""
    kind = type(error)
    if issubclass(kind, P2PTransferError):
        return True
    if is_raised_by_python(error):
        return False
    return issubclass(kind, DistError) or (kind is RuntimeError and _FROM_GLOO.match(text_of(error)) is not None)


def is_raised_by_python(error: BaseException) -> bool:
    """Whether a ``raise`` statement raised ``error``, rather than a function written in C or C++."""
    last: TracebackType | None = vars(BaseException)["__traceback__"].__get__(error)
    if last is None:
        return True
    while last.tb_next is not None:
        last = last.tb_next
    code = last.tb_frame.f_code.co_code
    at = last.tb_lasti
    return 0 <= at < len(code) and dis.opname[code[at]] in ("RAISE_VARARGS", "RERAISE")


def type_name(error: BaseException) -> str:
    """The exception's class as a traceback shows it."""
    kind = type(error)
    inner = ("builtins", "__main__")
    return _safely(
        lambda: kind.__qualname__ if kind.__module__ in inner else f"{kind.__module__}.{kind.__qualname__}",
        "an exception",
    )


def text_of(error: BaseException) -> str:
    """``str(error)``, at most as long as a record may be."""
    return _safely(lambda: str(error), "(its __str__ raises)")


def tail_of(error: BaseException) -> str:
    """The last lines of the exception's traceback."""
    return _safely(
        lambda: "\n".join("".join(traceback.format_exception(error)).splitlines()[-_TRACEBACK_LINES:]),
        "(its traceback cannot be formatted)",
    )


def _safely(read: Callable[[], str], otherwise: str) -> str:
    """What ``read`` returns, as a plain string of bounded length; ``otherwise`` where it raises."""
    try:
        return cut(str.__getitem__(read(), slice(None)))
    except BaseException:  # a user's __str__ may raise anything
        return otherwise

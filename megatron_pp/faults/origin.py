"""What an exception is, and where it was raised. Exceptions of user code may do anything when they are looked at, so
nothing here lets them raise, and their text decides nothing."""

from __future__ import annotations

import dis
import re
import traceback
from collections.abc import Callable
from types import TracebackType

from torch.distributed import DistError

from megatron_pp.errors import P2PTransferError
from megatron_pp.faults.records import cut

_TAIL = 12  # lines
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
    """Whether a ``raise`` statement raised ``error``, rather than a function that is written in C or C++."""
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
    return _safely(lambda: _qualified(kind), "an exception")


def text_of(error: BaseException) -> str:
    """``str(error)``, at most as long as a record may be."""
    return _safely(lambda: str(error), "(its __str__ raises)")


def tail_of(error: BaseException) -> str:
    """The last lines of the exception's traceback."""
    return _safely(lambda: _last_lines(traceback.format_exception(error)), "(its traceback cannot be formatted)")


def _qualified(kind: type) -> str:
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _last_lines(parts: list[str]) -> str:
    return "\n".join("".join(parts).splitlines()[-_TAIL:])


def _safely(read: Callable[[], str], otherwise: str) -> str:
    """What ``read`` returns, as a plain string of bounded length; ``otherwise`` where it raises."""
    try:
        return cut(str.__getitem__(read(), slice(None)))
    except BaseException:  # a user's __str__ may raise anything
        return otherwise

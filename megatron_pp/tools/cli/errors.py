"""Exit codes of commands, and the errors for them.

0  done
1  the answer is no: the plan is refused for any reason, or nothing fits
2  no answer: wrong arguments, a file that cannot be read or written, or a file without a plan
3  Ctrl-C or SIGTERM ended a search; the answer, if there is one, is the best that was found until then
130  Ctrl-C ended the command without an answer
"""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_pp.errors import FileFormatError, MegatronPPError, PlanError

OK = 0
REFUSED = 1
BAD_INPUT = 2  # the same as argparse's
INTERRUPTED = 3
ENDED = 130  # 128 + SIGINT, as in shells


class RefusedError(MegatronPPError):
    """The plan is incomplete, cannot run or does not verify. The exit code is REFUSED."""


class UsageError(MegatronPPError, ValueError):
    """Arguments do not fit together; the message says what would be right. The exit code is BAD_INPUT."""


@contextmanager
def refusing(name: str = "") -> Iterator[None]:
    """Turns a PlanError about the plan ``name`` into a RefusedError. The FileFormatError of a file without a plan is
    raised as it is.
    """
    try:
        yield
    except FileFormatError:
        raise
    except PlanError as error:
        raise RefusedError(f"{name and f'{name}: '}refused: {error}") from error

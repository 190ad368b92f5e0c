"""Exit codes, and the errors that a command ends with.

0  done
1  the answer is no: the plan is refused, whatever is wrong with it and wherever it came from, or nothing fits
2  no answer: wrong arguments, a file that cannot be read or written, or that holds no plan
3  a search was ended by Ctrl-C or SIGTERM: the answer, where there is one, is the best until then
130  ended by Ctrl-C, without an answer
"""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_pp.errors import FileFormatError, MegatronPPError, PlanError

OK = 0
REFUSED = 1
BAD_INPUT = 2  # argparse's own code too
INTERRUPTED = 3
ENDED = 130  # 128 + SIGINT, as shells have it


class RefusedError(MegatronPPError):
    """The plan is incomplete, cannot run or does not verify. Ends with REFUSED."""


class UsageError(MegatronPPError, ValueError):
    """Arguments that do not fit together; the message says what would be right. Ends with BAD_INPUT."""


@contextmanager
def refusing(name: str = "") -> Iterator[None]:
    """What is wrong with the plan called ``name`` becomes a RefusedError. The FileFormatError of a file that holds no
    plan stays one.
    """
    try:
        yield
    except FileFormatError:
        raise
    except PlanError as error:
        raise RefusedError(f"{name and f'{name}: '}refused: {error}") from error

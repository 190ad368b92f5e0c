"""Exit codes, and the errors that a command ends with."""

from __future__ import annotations

from megatron_pp.errors import MegatronPPError

OK = 0
REFUSED = 1  # the question was understood, and the answer is no: a plan that does not verify, nothing that fits
BAD_INPUT = 2  # wrong arguments or files; argparse's own code


class RefusedError(MegatronPPError):
    """The plan does not verify. Ends with REFUSED."""


class UsageError(MegatronPPError, ValueError):
    """Arguments that do not fit together; the message says what would be right. Ends with BAD_INPUT."""

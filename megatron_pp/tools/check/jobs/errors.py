"""The error that ends a check without an answer."""

from __future__ import annotations

from megatron_pp.errors import MegatronPPError


class UnreadableError(MegatronPPError, ValueError):
    """A configuration that cannot be read. The message says what was given, what is possible, and what to do."""

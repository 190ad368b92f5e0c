"""Warnings that a process logs once."""

from __future__ import annotations

import logging
import threading
from functools import lru_cache

logger = logging.getLogger("megatron_pp")
_LOCK = threading.Lock()


def warn_once(message: str) -> None:
    """Log ``message`` as a warning of ``megatron_pp``, once per process."""
    with _LOCK:  # ranks may be threads of one process
        _warn(message)


@lru_cache(maxsize=128)
def _warn(message: str) -> None:
    logger.warning(message)

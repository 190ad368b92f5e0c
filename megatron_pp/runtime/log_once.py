"""Warnings that a process logs once."""

from __future__ import annotations

import logging
import threading
from functools import lru_cache

logger = logging.getLogger("megatron_pp")
_LOCK = threading.Lock()


def say_once(sentence: str) -> None:
    """A warning in the log of ``megatron_pp``, once per process."""
    with _LOCK:  # ranks may be threads of one process
        _warn(sentence)


@lru_cache(maxsize=128)
def _warn(sentence: str) -> None:
    logger.warning(sentence)

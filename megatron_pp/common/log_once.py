"""Messages that a process logs once."""

import logging
import threading
from functools import lru_cache

logger = logging.getLogger("megatron_pp")
_LOCK = threading.Lock()


def warn_once(message: str) -> None:
    """Log ``message`` as a warning of ``megatron_pp``, once per process."""
    log_once(logging.WARNING, message)


def log_once(level: int, message: str) -> None:
    """Log ``message`` at this level of ``logging``, once per process."""
    with _LOCK:  # ranks may be threads of one process
        _log(level, message)


@lru_cache(maxsize=256)
def _log(level: int, message: str) -> None:
    logger.log(level, message)

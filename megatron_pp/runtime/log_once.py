"""What a process logs once."""

from __future__ import annotations

import logging
import threading
from functools import lru_cache

from megatron_pp.plan.spec import Plan

logger = logging.getLogger("megatron_pp")
_LOCK = threading.Lock()


def warn_once(message: str) -> None:
    """Log ``message`` as a warning of ``megatron_pp``, once per process."""
    with _LOCK:  # ranks may be threads of one process
        _warn(message)


def certify_once(plan: Plan) -> None:
    """Log, for information and once per process, what is proven of ``plan``."""
    if logger.isEnabledFor(logging.INFO):
        with _LOCK:
            _inform(f"{plan.spec.describe()}: {plan.certificate}")


@lru_cache(maxsize=128)
def _warn(message: str) -> None:
    logger.warning(message)


@lru_cache(maxsize=128)
def _inform(message: str) -> None:
    logger.info(message)

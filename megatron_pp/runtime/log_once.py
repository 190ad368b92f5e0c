"""Messages that a process logs once."""

import logging
import threading
from functools import lru_cache

from megatron_pp.on_demand import load
from megatron_pp.plan.ir.spec import Plan

logger = logging.getLogger("megatron_pp")
_LOCK = threading.Lock()


def warn_once(message: str) -> None:
    """Log ``message`` as a warning of ``megatron_pp``, once per process."""
    with _LOCK:  # ranks may be threads of one process
        _log(logging.WARNING, message)


def certify_once(plan: Plan) -> None:
    """Log once per process, as information, what ``verify`` has proven of ``plan`` and, if the plan was searched for
    measured times, its predicted step."""
    if logger.isEnabledFor(logging.INFO):
        with _LOCK:
            _log(logging.INFO, f"{plan.spec.describe()}: {plan.certificate}")
            if plan.spec.measured is not None:
                _log(logging.INFO, load("prediction").predicted(plan.spec))


@lru_cache(maxsize=256)
def _log(level: int, message: str) -> None:
    logger.log(level, message)

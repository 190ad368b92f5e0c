"""``CUDA_DEVICE_MAX_CONNECTIONS``: how many hardware queues the streams of a process share.

Streams that share a queue wait for each other's operations in the order of issue. Source: CUDA C++ programming guide,
environment variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_DEFAULT, _MOST = 8, 32


def queue_advice(streams: int, needs_one: bool, environ: Mapping[str, str] = os.environ) -> str | None:
    """A sentence for the log where the variable does not suit the run; None where it does.

    ``streams``: those that the pipeline uses on a rank. ``needs_one``: tensor or context parallel layers rely on one
    queue, as Megatron requires before Blackwell.
    """
    text = environ.get(VARIABLE)
    queues = _DEFAULT if not text else int(text) if text.isdecimal() else 0
    advice = f"set it to {1 if needs_one else _MOST}"
    if not 1 <= queues <= _MOST:
        why, advice = "no number of hardware queues", f"it must be a whole number from 1 to {_MOST}"
    elif needs_one and queues > 1:
        why = "before Blackwell, tensor and context parallel layers overlap as intended only in the order of issue"
    elif queues == 1 and not needs_one:
        why = "a transfer that waits for its peer can hold compute back, and nothing in this run needs one queue"
    elif 1 < queues < streams:
        why = f"the pipeline uses {streams} streams, of which some share a queue and wait for each other"
    elif not text:
        why = f"enough for the pipeline's {streams} streams, but not for data parallel communication beside them"
    else:
        return None
    return f"{VARIABLE} is {text or f'not set, which means {_DEFAULT} hardware queues'}: {why}; {advice}"

"""Options of the NCCL communicators of channels.

A kernel that waits for its peer occupies as many thread blocks (CTAs, of 640 threads) as its communicator may use, and
receives are posted ahead. So a channel has a limit of its own, far below NCCL's default (32 on Hopper). Its stream has
high priority: torch has a pool of such streams, from which neither ``torch.cuda.Stream()`` nor the communicators of
other groups take theirs by default.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_MAX_CTAS = 8  # two receives that wait then hold 12% of the 132 multiprocessors of an H100


def channel_options(pipeline: Any, max_ctas: int | None) -> Any:
    """``ProcessGroupNCCL.Options`` of a channel: the NCCL settings that the pipeline group was made with (``pipeline``,
    its options), on a stream of high priority.

    ``max_ctas``: at most so many thread blocks for each transfer; None: what the pipeline group has, or else 8.
    """
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    unset: Any = dist.ProcessGroupNCCL.Options().config
    given = pipeline.config
    for name in dir(given):
        value = getattr(given, name)
        if not name.startswith("_") and value is not None and not callable(value):
            setattr(options.config, name, value)
    if max_ctas is None and given.max_ctas == unset.max_ctas:
        # NCCL refuses a maximum below the minimum.
        max_ctas = _MAX_CTAS if given.min_ctas == unset.min_ctas else max(_MAX_CTAS, given.min_ctas)
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return options

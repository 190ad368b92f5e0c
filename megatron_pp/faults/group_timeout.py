"""Compares the timeouts that a config sets with that of the process group."""

import logging

from megatron_pp.comm.transport import Transport
from megatron_pp.config.settings import StepSettings

logger = logging.getLogger("megatron_pp")


def warn_if_shorter(transport: Transport, settings: StepSettings) -> None:
    """Warn if the group's own timeout ends before one that the config sets. The group's error says less, and NCCL's
    ends the process by default."""
    name = "p2p_timeout" if settings.compute_timeout is None else "compute_timeout"
    seconds = getattr(settings, name)
    limit = None if transport.limit is None else transport.limit.total_seconds()
    if limit is not None and limit < seconds and transport.rank == 0:
        logger.warning(
            "the process group of pipeline %s gives up after %g s, but config.%s is %g s: a long operation may end in "
            "the group's error, which says less; make the group with a longer timeout "
            "(--distributed-timeout-minutes of Megatron)",
            transport.name, limit, name, seconds,
        )  # fmt: skip

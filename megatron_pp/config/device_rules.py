"""The rules of a CUDA device that a step's settings ask its plan to satisfy. Loaded for ranks on NCCL."""

from megatron_pp.config.settings import TE_GRAPHS, StepSettings
from megatron_pp.plan.ir.spec import ANY_WAIT, DEVICE_SYNC, ONE_QUEUE, STATIC_BUFFERS


def device_rules(settings: StepSettings) -> tuple[str, ...]:
    """The rules that the plan of this step must satisfy; see ``plan/ir/spec.py``."""
    # Megatron's timers around each forward and backward synchronise the device.
    timed = getattr(settings.timers, "_log_level", 0) >= 2
    holds = {
        ONE_QUEUE: True,
        ANY_WAIT: settings.device_sync is not False,
        DEVICE_SYNC: timed if settings.device_sync is None else settings.device_sync,
        STATIC_BUFFERS: settings.cuda_graph_impl == TE_GRAPHS,
    }
    return tuple(rule for rule, true in holds.items() if true)

"""torch's pipeline stages (``torch.distributed.pipelining``) run by this engine."""

from megatron_pp.integrations.torch_pipelining.names import get_schedule_class, use_in
from megatron_pp.integrations.torch_pipelining.schedule import PlanSchedule

__all__ = ["PlanSchedule", "get_schedule_class", "use_in"]

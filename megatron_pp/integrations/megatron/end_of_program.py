"""The warning at a program's end, if none of its steps has run through the engine after `install()`."""

import logging
import sys

from megatron_pp.integrations.megatron.releases import other_schedules
from megatron_pp.integrations.megatron.stand_ins import SCHEDULES, STAND_INS, Plugin, names_differ, stand_ins

logger = logging.getLogger("megatron_pp")


def report_unused(plugin: Plugin | None) -> None:
    """``plugin``: the one that is installed at the end, and that no step has called; None if there is none."""
    module = sys.modules.get(SCHEDULES)
    if plugin is not None and names_differ(plugin.megatron.schedules):
        schedules = plugin.megatron.schedules
        other_schedules.report_unused(schedules, stand_ins(schedules))
    elif plugin is None and module is not None and any(one.plugin is not None for one, _ in STAND_INS.items()):
        logger.warning(
            "Megatron-core's modules were removed and imported anew after install(): steps since then ran its own "
            "schedules. There, call install() again"
        )

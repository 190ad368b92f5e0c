"""A call of Megatron-core's schedules that the engine does not serve: Megatron's own function runs it."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from megatron_pp.errors import NotServedError
from megatron_pp.integrations.megatron.steps.gpt_models import has_built_v
from megatron_pp.integrations.megatron.steps.served.scope import HANDED_BACK

logger = logging.getLogger("megatron_pp")


def run(
    theirs: Callable[..., Any], arguments: Mapping[str, Any], reason: str, strict: bool, logged: set[str]
) -> list[Any]:
    """Call ``theirs``, Megatron's function. ``reason``: why, as the object of "does not serve"; it is logged once, and
    is then one of those ``logged``. Raises NotServedError under ``strict``, ScheduleInputError for models that
    Megatron's schedule would run wrongly."""
    if has_built_v():
        from megatron_pp.integrations.megatron.steps import v_step

        v_step.check_handed_back(reason, arguments.get("model"))
    if strict:
        raise NotServedError(f"megatron_pp does not serve {reason}; install() without strict=True lets Megatron run it")
    if reason not in logged:
        logged.add(reason)
        logger.warning("megatron_pp does not serve %s: Megatron-core's own schedule runs instead", reason)
    token = HANDED_BACK.set(True)
    try:
        found: list[Any] = theirs(**arguments)
        return found
    finally:
        HANDED_BACK.reset(token)

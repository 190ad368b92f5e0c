"""Which steps of Megatron-core's the engine serves, and which Megatron's own schedule runs."""

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.common.module_attributes import wrapped_attribute
from megatron_pp.integrations.megatron.releases.release import Megatron
from megatron_pp.integrations.megatron.releases.versions import ENTRIES, Row, entry_keywords
from megatron_pp.integrations.megatron.steps.served.served_configs import is_combined, unserved_setting

# Whether Megatron's own schedule runs: the schedule functions that it calls by name are Megatron's too then.
HANDED_BACK: ContextVar[bool] = ContextVar("megatron_pp_handed_back", default=False)


def without_defaults(theirs: Callable[..., Any], row: Row, arguments: dict[str, Any]) -> dict[str, Any]:
    """The keyword ``arguments`` without those that the engine does not know and that have their default in ``theirs``,
    Megatron's schedule function. Raises TypeError for a keyword that ``theirs`` does not take.
    """
    unknown = _unknown(row, arguments)
    if not unknown:
        return arguments
    signature = inspect.signature(theirs)
    signature.bind_partial(**{name: arguments[name] for name in unknown})
    return {n: v for n, v in arguments.items() if n not in unknown or v is not signature.parameters[n].default}


def reason_not_served(
    megatron: Megatron, schedule: str, arguments: Mapping[str, Any], overrides: Mapping[str, Any]
) -> str | None:
    """Why Megatron's own ``schedule`` runs a call with these keyword ``arguments``, as the object of "does not serve
    ..."; None if the engine runs it. ``overrides``: fields of the config that `install()` sets. Raises
    ScheduleInputError for a call that no schedule of Megatron's runs either.
    """
    if unknown := _unknown(megatron.row, arguments):
        return f"the keyword argument {unknown[0]!r} of this release's schedules, which it does not know"
    if has_modules(megatron, arguments):
        from megatron_pp.integrations.megatron.steps import modules

        found: str | None = modules.reason_not_served(megatron, schedule, arguments, overrides)
        return found or _unserved_communicator(megatron, schedule, {}) or _unserved_config(schedule, arguments)
    return _unserved_communicator(megatron, schedule, arguments) or _unserved_config(schedule, arguments)


def has_modules(megatron: Megatron, arguments: Mapping[str, Any]) -> bool:
    """Whether the call is for a pipeline of several modules."""
    given = arguments.get(megatron.row.groups_keyword), arguments.get("p2p_communicator")
    return any(isinstance(one, megatron.multi_module) for one in given)


def _unknown(row: Row, arguments: Mapping[str, Any]) -> list[str]:
    known = _known(row)
    return [name for name in arguments if name not in known]


@lru_cache(maxsize=8)
def _known(row: Row) -> frozenset[str]:
    return frozenset({*entry_keywords(row), "p2p_communicator"})


# Modules of the methods of Megatron's communicator, and of the ranges that its releases put around them.
_THEIR_MODULES = ("megatron.core.", "nvtx.", "contextlib", "nemo.lens.")
_OF_TENSORS = ("variable_seq_lengths", "mtp_standalone", "pipeline_dtype")  # config fields that a communicator reads


def _unserved_communicator(megatron: Megatron, schedule: str, arguments: Mapping[str, Any]) -> str | None:
    communicator = arguments.get("p2p_communicator")
    if isinstance(communicator, P2PCore) or (communicator is None and schedule == ENTRIES[0]):
        return None
    base = megatron.schedules.P2PCommunicator
    kind = base if communicator is None else type(communicator)
    if own := _own_transfers(getattr(communicator, "__dict__", {}), kind, base):
        return f"a p2p_communicator with transfers of its own ({kind.__name__}.{own[0]})"
    config, models = getattr(communicator, "config", None), wrapped_attribute(_first_chunk(arguments), "config")
    for name in () if config is None or config is models or schedule == ENTRIES[0] else _OF_TENSORS:
        if (getattr(config, name, None) or None) != (getattr(models, name, None) or None):
            return f"a p2p_communicator with a config of its own (another {name} than the model's)"
    return None


def _own_transfers(own: Mapping[str, Any], kind: type, base: type) -> list[str]:
    """Methods by which a communicator of ``kind``, with the attributes ``own``, sends or receives in another way than
    Megatron's. ``base`` is Megatron's class, unless the program has replaced it or methods of it."""
    found = []
    for name in vars(base):
        if name.startswith(("send_", "recv_", "_communicate")):
            method = getattr(base, name)
            where = str(getattr(method, "__globals__", {}).get("__name__"))
            if name in own or getattr(kind, name, None) is not method or not where.startswith(_THEIR_MODULES):
                found.append(name)
    return found


def _first_chunk(arguments: Mapping[str, Any]) -> Any:
    model = arguments.get("model")
    return model[0] if isinstance(model, (list, tuple)) and model else model


def _unserved_config(schedule: str, arguments: Mapping[str, Any]) -> str | None:
    chunk, forward_only = _first_chunk(arguments), arguments.get("forward_only", False)
    config = wrapped_attribute(chunk, "config")
    if is_combined(config, forward_only):
        from megatron_pp.integrations.megatron.steps import combined

        if reason := combined.reason_of_release():
            return reason
    sharded = getattr(wrapped_attribute(chunk, "ddp_config"), "use_megatron_fsdp", False)
    if reason := unserved_setting(config, sharded, forward_only):
        return reason
    if has_attention_residuals(config):
        from megatron_pp.integrations.megatron.steps import attention_residuals

        return attention_residuals.reason_not_served(schedule)
    return None


def has_attention_residuals(config: Any) -> bool:
    """Whether stages pass on the sums of earlier blocks of layers."""
    return bool(getattr(config, "enable_attention_residuals", False))

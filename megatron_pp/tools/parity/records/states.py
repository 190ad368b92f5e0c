"""The values of a training step other than parameters: buffers, the optimizer's state and schedule, and reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from megatron_pp.common.module_attributes import unwrapped
from megatron_pp.tools.parity.records.parameters import Place, global_name


def named_buffers(chunk: Any, place: Place) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in the whole model, buffer) of each buffer that a checkpoint would have. Other buffers are scratch space,
    such as the router's count of this rank's tokens."""
    model = unwrapped(chunk)
    modules = dict(model.named_modules())
    for path, module in modules.items():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield global_name(f"{path}.{name}".lstrip("."), modules, place), buffer


def optimizer_states(
    optimizers: Iterable[Any], names: dict[int, str]
) -> Iterator[tuple[str, str, torch.Tensor, torch.nn.Parameter, int]]:
    """The states of this rank's optimizers: (name of the parameter, name of the state, its values, the parameter, the
    position in the flat parameter at which they begin). ``names`` maps the id of a parameter to its name.
    """
    seen = set()
    for optimizer in _single(optimizers):
        inner = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(getattr(inner, "state", None), dict):
            continue
        for parameter, held, begin in _held_by(optimizer, inner):
            name = names.get(id(parameter))
            for key, value in inner.state.get(held, {}).items():
                whole = isinstance(value, torch.Tensor) and value.numel() in (1, held.numel())
                if name is not None and whole and (name, key) not in seen:
                    seen.add((name, key))
                    yield name, key, value, parameter, begin


def _single(optimizers: Iterable[Any]) -> Iterator[Any]:
    """The single optimizers, also those in chains."""
    for optimizer in optimizers:
        chained = getattr(optimizer, "chained_optimizers", None)
        yield from [optimizer] if chained is None else _single(chained)


def _held_by(optimizer: Any, inner: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int]]:
    """(parameter of the model, its tensor in torch's optimizer, the position in the parameter at which it begins)."""
    sharded = getattr(optimizer, "model_param_group_index_map", None)
    if sharded is None:
        for parameter in list(inner.state):
            if isinstance(parameter, torch.nn.Parameter):
                yield parameter, parameter, 0
        return
    for parameter, (group, index) in sharded.items():
        part = optimizer._get_model_param_range_map(parameter)["param"]
        yield parameter, inner.param_groups[group]["params"][index], part.start


def schedule_values(groups: Iterable[dict[str, Any]]) -> dict[str, float]:
    """The learning rate and the weight decay of this step, for each kind of parameter group. The multipliers of a group
    determine its kind."""
    found = {}
    for group in groups:
        kind = [
            f"{name} {group[name]:g}" for name in ("lr_mult", "wd_mult") if isinstance(group.get(name), (int, float))
        ]
        kind += ["decoupled"] if group.get("is_decoupled_lr") else []
        for key, name in (("lr", "learning rate"), ("weight_decay", "weight decay")):
            if isinstance(group.get(key), (int, float)):
                found[f"{name} ({', '.join(kind)})" if kind else name] = float(group[key])
    return found


def report_values(reports: Any) -> Iterator[tuple[int, str, np.ndarray]]:
    """(microbatch of this rank, name, numbers) of a schedule's return value. Values that are not numbers or dicts of
    numbers are left out."""
    for number, report in enumerate(reports if isinstance(reports, (list, tuple)) else ()):
        for name, value in report.items() if isinstance(report, dict) else ():
            numbers = _numbers(value)
            if numbers is not None:
                yield number, str(name), numbers


def _numbers(value: Any) -> np.ndarray | None:
    parts = value if isinstance(value, (tuple, list)) else [value]
    if not parts or not all(isinstance(part, (int, float, torch.Tensor)) for part in parts):
        return None
    flat = [torch.as_tensor(part).detach().double().cpu().reshape(-1) for part in parts]
    return torch.cat(flat).numpy().copy()


def without_dropout(chunk: Any) -> bool:
    """Switches off the dropout of a model, because its random numbers depend on the layout. Returns whether there was
    any."""
    found = False
    for module in unwrapped(chunk).modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p:
            module.p = 0.0
            found = True
        for name in ("hidden_dropout", "attention_dropout"):  # attributes of Megatron's layers and of their config
            for owner in (module, getattr(module, "config", None)):
                if isinstance(getattr(owner, name, None), float) and getattr(owner, name):
                    setattr(owner, name, 0.0)
                    found = True
    return found

"""Saves a program's settings of FSDP2's hooks (``set_reshard_after_forward`` and others), and restores them after a
step.

FSDP2 has public calls that set them and none that returns them. So they are read and written in FSDP2's own attributes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_MESH = "post_forward_mesh_info"  # None: parameters stay whole after a forward
# FSDP2 chooses for a root module in its first forward: the root's parameters stay whole.
_AUTO = "_auto_reshard_after_forward"
_OF_MODULE = (_AUTO, "_states_to_backward_prefetch")
_OF_GROUP = (_MESH, "reduce_grads", "all_reduce_grads", "reshard_after_backward", "unshard_in_backward")


class HookSettings:
    """The hook settings of sharded ``modules``."""

    def __init__(self, modules: Iterable[Any]) -> None:
        self.states = [module._get_fsdp_state() for module in modules]
        owners: list[tuple[Any, tuple[str, ...]]] = [(one, _OF_MODULE) for one in self.states]
        owners += [(group, _OF_GROUP) for state in self.states for group in _groups(state)]
        self.found = [(one, {name: getattr(one, name) for name in names}) for one, names in owners]

    def give_back(self) -> None:
        for owner, values in self.found:
            for name, value in values.items():
                setattr(owner, name, value)
        for state in self.states:
            for group in _groups(state) if state._is_root and getattr(state, _AUTO) else ():
                setattr(group, _MESH, None)


def _groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)
    return [group for group in [state._fsdp_param_group] if group] if several is None else several

"""The name under which the members of a process group meet in the job's store, different for any two groups."""

from __future__ import annotations

import torch
import torch.distributed as dist


def name_of(group: dist.ProcessGroup, backend: str, device: torch.device) -> str:
    """The global ranks of ``group`` and torch's name of it: ``0-1 in group 3``. Two groups over the same ranks differ.

    gloo connects its members through the store under torch's name, and so does NCCL in ``new_group``, which numbers
    groups in the order in which all ranks of the job make them; so the members share the name. ``split_group`` does
    not use the store: its name hashes how many groups the rank is in, and members may have different ones. There the
    first member's name counts, sent to the others over the group: collective, and on NCCL only.
    """
    ranks = "-".join(map(str, dist.get_process_group_ranks(group)))
    own = group.group_name
    return f"{ranks} in group {own if backend != 'nccl' or own.isdecimal() else name_of_first(group, device)}"


def name_of_first(group: dist.ProcessGroup, device: torch.device) -> str:
    """torch's name of ``group`` on its first member. Collective."""
    names = [group.group_name]
    dist.broadcast_object_list(names, src=dist.get_global_rank(group, 0), group=group, device=device)
    return names[0]

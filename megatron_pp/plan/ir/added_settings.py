"""The settings that features add to a plan's spec, for type checkers only. When a program runs, ``feature.py`` takes
them from the table of features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_pp.feature_table import RECEIVED


@dataclass(frozen=True, kw_only=True)
class SpecSettings:
    """The settings of ``feature_table.SPEC_DEFAULTS``.

    skip_tensors      named tensors that stages send to later ones, or their declaration as text
    skip_cache        which named tensors a rank keeps, so that they are not sent again: one of CACHES
    offload_chunks    chunks of every rank, from its first, whose forwards are offloaded; None: the schedule's own
    offload_slots     compute slots for which a copy between device and host is placed (>= 1)
    slices            number of slices of every sequence; with several, operations and messages are of one slice
    fsdp_collectives  how stages' parameters are gathered and their gradients reduced over data-parallel replicas;
                      empty: the plan does neither
    fsdp_max_active_stages  how many stages of a rank may have whole parameters at a time; 0: all
    overlap_pairs     a forward right before a full backward of another microbatch is a pair that runs as one
    """

    skip_tensors: tuple[Any, ...] = ()
    skip_cache: str = RECEIVED
    offload_chunks: int | None = None
    offload_slots: int = 1
    slices: int = 1
    fsdp_collectives: str = ""
    fsdp_max_active_stages: int = 0
    overlap_pairs: bool = False

"""Errors instead of hangs: a failure of one rank becomes an error on all; see ``guard.py``."""

from megatron_pp.faults.guard import FaultGuard as FaultGuard

__all__ = ["FaultGuard"]

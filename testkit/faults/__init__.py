"""Faults on order: ranks that raise, end, stop or are cut off, and a pool of real processes that meets them."""

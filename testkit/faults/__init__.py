"""Injected faults: ranks that raise, end, stop or are disconnected, and a pool of real processes in which they
happen."""

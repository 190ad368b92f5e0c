"""Numbers of transports that the simulator, estimates of memory and the transports themselves share."""

GLOO_DETACHED_BYTES = 256 * 1024
"""On gloo, one-way channels for activations of at least this size get a connection of their own, and a thread that
posts their sends: the hand-over costs tens of microseconds, posting costs milliseconds
(``comm/gloo/waiting_threads.py``)."""

MAX_CTAS = 8
"""NCCL's channels, and so thread blocks, that each of our communicators has at most if no option is set. Two receives
that wait then hold 12% of the 132 multiprocessors of an H100."""

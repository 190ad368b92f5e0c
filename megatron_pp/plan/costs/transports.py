"""What transports do by size, which the simulator and the transport itself have to agree on."""

GLOO_DETACHED_BYTES = 256 * 1024
"""On gloo, one-way channels for activations of at least this size get a connection of their own, and a thread that
posts their sends: the hand-over costs tens of microseconds, posting costs milliseconds
(``comm/gloo/waiting_threads.py``)."""

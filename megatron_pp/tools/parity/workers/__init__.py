"""Processes that run a script or ranks, with a deadline and an end to all of them."""

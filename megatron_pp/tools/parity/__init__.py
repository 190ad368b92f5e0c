"""Tests whether a parallel layout computes the same as one process: the command `megatron-pp parity` for scripts, and
`compare` for a user's own model. ``megatron_pp.parity`` has the public names.
"""

"""Does a parallel layout compute what one process does? The command `megatron-pp parity`, and `compare` for a model of
one's own. ``megatron_pp.parity`` has the public names; `cpu_stand_in` is imported ahead of torch where it is used.
"""

"""Recorded runs: the files that ``megatron_pp.trace`` writes, merged, and compared with their plans. Without torch."""

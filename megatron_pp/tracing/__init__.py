"""Recorded runs: the files that ``megatron_pp.tracing.recorder`` writes, merged, and compared with their plans. Without
torch.
"""

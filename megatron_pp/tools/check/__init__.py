"""`megatron-pp check`: what would fail, compute wrongly, wait or run out of memory in a job, before it is launched."""

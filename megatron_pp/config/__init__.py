"""The configuration that the schedules read: Megatron's field names, and ours. Nothing here imports torch."""

"""Megatron-core's training loop on this engine: what `integrations.megatron_core` has behind its `install()`."""

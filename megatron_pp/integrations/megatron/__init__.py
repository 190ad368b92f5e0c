"""Megatron-core's training loop on this engine: the modules behind `install()` of `integrations.megatron_core`."""

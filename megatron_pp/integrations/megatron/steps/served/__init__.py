"""Which steps of Megatron-core's the engine serves, by the arguments of a call and by settings."""

"""Steps of Megatron-core's training loop: which of them the engine serves, and how it runs them."""

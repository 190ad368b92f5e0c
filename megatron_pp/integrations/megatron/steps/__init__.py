"""Steps of Megatron-core's training loop: which are served, and what runs in them."""

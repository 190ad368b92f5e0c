"""Stand-ins of other libraries on the CPU: Transformer Engine, apex and Megatron's timers."""

"""A job as its flags or its files describe it: how each program's settings become those of Megatron."""

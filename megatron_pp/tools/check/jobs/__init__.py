"""Reads a job from its flags or files, and converts each program's settings to Megatron's."""

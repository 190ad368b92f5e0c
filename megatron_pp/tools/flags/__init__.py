"""Megatron's flags without Megatron: their names, kinds and defaults, and how words and files give them values."""

"""A table of Megatron's flags that needs no Megatron: names, kinds and defaults, and readers of command lines and
files.
"""

"""Plug-ins that put this engine under other training stacks."""

"""Searches for plans, and lower bounds. A step loads it only for ``auto``, ``auto_v`` and unequal microbatches."""

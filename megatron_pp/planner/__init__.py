"""Searches for plans, lower bounds, and advice. Nothing that runs in a step imports this."""

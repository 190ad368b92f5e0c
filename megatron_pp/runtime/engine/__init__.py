"""Runs the plan of a step on one rank: its instructions, and the compute of the microbatches."""

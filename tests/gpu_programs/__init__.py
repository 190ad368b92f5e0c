"""Runs the programs for GPUs on virtual devices, and records which of their lines run."""

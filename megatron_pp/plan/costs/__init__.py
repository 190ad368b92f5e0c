"""Costs of compute, messages and memory."""

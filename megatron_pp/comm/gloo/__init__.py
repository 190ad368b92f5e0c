"""Transfers over gloo."""

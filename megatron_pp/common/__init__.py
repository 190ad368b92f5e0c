"""Helpers that know nothing of pipelines."""

"""Pipelines of several modules: encoders and a language model, each on its own grid of ranks."""

"""Sequences cut into slices (``sequence_slices``)."""

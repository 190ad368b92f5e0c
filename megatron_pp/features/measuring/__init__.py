"""Measures a model's costs on its machines, in its own run (``measure``)."""

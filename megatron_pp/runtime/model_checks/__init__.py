"""Checks of the model chunks of a call: their places in the pipeline, their layers, and what synchronises them."""

"""Layers of a transformer: their sizes, what their parts compute, keep and send, and how long GPUs take for it."""

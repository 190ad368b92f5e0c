"""Flags of ``scripts/train.py`` that every test of it shares."""

SMALL_MODEL = [
    *("--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "32", "--micro-batch-size", "2"),
    *("--eval-steps", "1", "--no-tensorboard", "--no-plot"),
]
"""The flags of a model whose steps take almost no time."""

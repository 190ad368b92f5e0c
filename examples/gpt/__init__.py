"""The training program's parts, each a small file with one subject; ``scripts/train.py`` runs them."""

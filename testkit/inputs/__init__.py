"""Plans and files that tests draw, change, forge or get from PyTorch."""

"""What compute, messages and memory cost."""

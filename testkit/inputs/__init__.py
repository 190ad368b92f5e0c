"""Inputs of tests: plans and files that are drawn at random, changed, forged, or written by PyTorch."""

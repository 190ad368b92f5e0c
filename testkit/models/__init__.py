"""Stages and models for tests: toy stages, modules on grids of ranks, layers in graphs, and hooks that write a log."""

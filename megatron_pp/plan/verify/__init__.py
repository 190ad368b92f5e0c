"""Decides whether a plan may run: it checks completeness, lifetimes, memory and deadlock."""

"""Engines, plans, guards and devices with one fault each, which the checks must catch."""

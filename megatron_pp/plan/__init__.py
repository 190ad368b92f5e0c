"""Schedules as data: built, verified and simulated without torch."""

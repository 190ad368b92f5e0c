"""Runs steps, and exchanges of messages, with ranks as threads of one process."""

"""Runs steps of the engine on virtual devices, and instructions that wait for a device."""

"""Differences between releases of Megatron-core, and the functions of a release that the plug-in knows."""

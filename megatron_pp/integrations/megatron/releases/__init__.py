"""What differs between releases of Megatron-core, and which functions of a release the plug-in knows."""

"""Megatron-core on a CPU, behind `cpu_stand_in`: collectives, layers and dtypes that only GPUs have otherwise."""

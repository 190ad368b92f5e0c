"""Stages whose parameters are sharded over data-parallel replicas by FSDP2 (``fsdp_collectives``)."""

"""Transfers over NCCL."""

"""Checks of what is sent and of its memory (``p2p_debug``)."""

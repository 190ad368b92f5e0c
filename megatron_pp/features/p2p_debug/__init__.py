"""Debug mode (``p2p_debug``): checks of messages and of the memory of sends."""

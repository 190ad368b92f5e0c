"""Models cut into pipeline stages."""

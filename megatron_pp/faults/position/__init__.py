"""Where this rank is in its program: its host's threads, and its device."""

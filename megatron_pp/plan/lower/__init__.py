"""Order to plan: communication, releases, syncs and what features have are added to a compute order."""

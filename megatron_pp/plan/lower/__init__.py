"""Order to plan: communication, releases, syncs and offloads are added to a compute order."""

"""Makes a plan of a compute order: adds communication, releases, syncs, and the instructions of features."""

"""Judges that use nothing of the package: one of plans, one of logs of calls to streams."""

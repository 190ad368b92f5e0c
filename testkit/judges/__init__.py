"""Two checkers that use nothing of the package: one of plans, and one of logs of calls to streams."""

"""Runs that plan anew while they go on (``pipeline_replan``)."""

"""Records that ranks publish in the job's store, and what this rank has read of the others."""

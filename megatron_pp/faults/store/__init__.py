"""What ranks publish in the job's store, and what this rank knows of the others from it."""

"""Tables of runs whose numbers must equal those of one process. ``rows.py`` says how to add a row."""

"""Tables of numbers that must be those of one process. ``rows.py`` says how a row is added."""

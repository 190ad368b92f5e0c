"""The answer from two records: equal or not, the part of the layout that differs; as text, page and file."""

"""What two records say: equal or not, which part of the layout differs, and the answer as text, page and file."""

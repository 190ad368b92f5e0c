"""What scripts/docs.sh adds to the pages of docs/: pages from elsewhere in the project, and the gallery."""

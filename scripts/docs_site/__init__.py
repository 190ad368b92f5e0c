"""The parts of the site that scripts/docs.sh adds to docs/: pages from elsewhere in the project, and the gallery."""

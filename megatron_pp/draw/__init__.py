"""Timelines as pictures: terminal text, the classic grid, SVG, HTML, PNG, and Chrome's trace format."""

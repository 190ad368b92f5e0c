"""Draws timelines in programs and notebooks. These are the public names of ``tools/draw``."""

from megatron_pp.tools.draw import Point, Timeline, figure, front, png, render_html, simulated_timeline, svg

__all__ = ["Point", "Timeline", "figure", "front", "png", "render_html", "simulated_timeline", "svg"]

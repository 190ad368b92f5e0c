"""Names of torch's schedules."""

OUR_NAME = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved_1f1b",
    "loopedbfs": "breadth_first",
    "interleavedzerobubble": "interleaved_zb",
    "zbvzerobubble": "zb_v",
    "dualpipev": "dualpipe_v",
}
"""By torch's name in lower case, without "Schedule" at its front."""

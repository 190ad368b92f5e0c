"""The environment variables of settings, and the names of removed settings. Never imports torch."""

PREFIX = "MEGATRON_PP_"

REMOVED = {
    "pipeline_replan": "plans no longer change while a job runs. Leave it out. For a plan that fits what stages and "
    "links take, run some steps with measure=5 (--measure 5), and start the job again with pipeline_schedule='auto' "
    "and pipeline_measured set to the file that was written. For microbatches that differ, microbatch_costs is enough"
}
"""Removed settings, and what to do instead of them."""


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def why_removed(name: str) -> str:
    """For a removed setting, a sentence that says what to do instead of it. Empty for any other name."""
    return f"{name} is no longer a setting: {REMOVED[name]}" if name in REMOVED else ""

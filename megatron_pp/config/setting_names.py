"""Names of settings: their variables in the environment, and settings that there were. Never imports torch."""

PREFIX = "MEGATRON_PP_"

REMOVED = {
    "pipeline_replan": "plans no longer change while a job runs. Leave it out. For a plan that fits what stages and "
    "links take, run some steps with measure=5 (--measure 5), and start the job again with pipeline_schedule='auto' "
    "and pipeline_measured set to the file that was written. For microbatches that differ, microbatch_costs is enough"
}
"""Settings that there were, and what to do instead of them."""


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def why_removed(name: str) -> str:
    """What to do instead of a setting that there was, as a sentence; empty for any other name."""
    return f"{name} is no longer a setting: {REMOVED[name]}" if name in REMOVED else ""

"""The environment variables of settings. Never imports torch."""

PREFIX = "MEGATRON_PP_"


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()

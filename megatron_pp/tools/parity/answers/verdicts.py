"""The verdicts of a comparison, from good to bad, with their sentences and the exit codes of `megatron-pp parity`."""

EQUAL, ROUNDING, NOT_EXERCISED, DIFFERENT = ORDER = ("equal", "rounding", "not exercised", "different")
SENTENCES = {
    EQUAL: "equal to the last bit",
    ROUNDING: "equal within the rounding of sums in another order",
    NOT_EXERCISED: "NOT EXERCISED",
    DIFFERENT: "DIFFERENT",
}
EXIT_CODES = {EQUAL: 0, ROUNDING: 0, DIFFERENT: 1, NOT_EXERCISED: 2}
REPEAT = "repeat: "
"""The beginning of the line of an answer that has a command."""

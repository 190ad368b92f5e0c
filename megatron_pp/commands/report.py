"""``megatron-pp report``."""

SUMMARY = "compare a traced run with its plan"
EXAMPLES = ""


def add_arguments(parser):
    parser.add_argument("run_folder")


def run(args, console):
    return 0

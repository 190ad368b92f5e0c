"""The lengths of the slices of a sequence, and the shapes of their messages."""

from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import PlanError, ScheduleInputError
from megatron_pp.features.slices.slice_costs import slice_lengths
from megatron_pp.plan.costs.attention import attention_share
from megatron_pp.runtime.arguments import StepInputs, whole_argument
from megatron_pp.runtime.engine.compute import Shapes


def cut(
    inputs: StepInputs, settings: StepSettings, tp_size: int, cp_size: int, shapes: Shapes
) -> tuple[tuple[int, ...], tuple[Shapes, ...]]:
    """Lengths in tokens of the slices that ``config.sequence_slices`` cuts sequences into, and the shapes of each
    slice's messages. ``shapes``: those of whole sequences, whose first dimension is tokens (of one tensor parallel
    rank). Raises ScheduleInputError for impossible lengths, and for options that exclude slices."""
    slices = settings.sequence_slices
    for given, name, why in (
        (settings.shapes_vary, "variable_seq_lengths", "a microbatch's length is not known when it is cut"),
        (inputs.adjust_tensor_shapes_fn is not None, "adjust_tensor_shapes_fn", "the engine cuts shapes itself"),
        (cp_size > 1, "context parallelism", "that cuts sequences too, in another order"),
        (
            settings.num_microbatches_with_partial_activation_checkpoints is not None,
            "num_microbatches_with_partial_activation_checkpoints",
            "its windows are of whole microbatches",
        ),
    ):
        if given:
            raise ScheduleInputError(f"config.sequence_slices is {slices}, which does not go with {name}: {why}")
    name = "seq_length" if inputs.decoder_seq_length is None else "decoder_seq_length"
    length = whole_argument(name, getattr(inputs, name), hint="config.sequence_slices cuts sequences of that length")
    attention = 0.0
    if settings.balance_sequence_slices:
        hidden = whole_argument("config.hidden_size", settings.hidden_size, hint="it says what attention costs")
        attention = attention_share(length, hidden, settings.ffn_hidden_size or 4 * hidden)
    try:
        lengths = slice_lengths(length, slices, attention, tp_size if settings.sequence_parallel else 1)
    except PlanError as error:
        raise ScheduleInputError(f"config.sequence_slices: {error}") from error
    cut = [[None if s is None else (s[0] * tokens // length, *s[1:]) for s in shapes] for tokens in lengths]
    return lengths, tuple(Shapes(*one) for one in cut)

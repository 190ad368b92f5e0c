"""The share of causal attention in the time of a transformer layer."""

from megatron_pp.errors import PlanError


def attention_share(seq_length: int, hidden_size: int, ffn_hidden_size: int) -> float:
    """The share of causal attention in a transformer layer's operations: per token 2 s h (two products with s / 2 keys
    and values on average), beside 8 h^2 + 4 h f of linear layers.
    """
    attention = 2 * seq_length * hidden_size
    return attention / (attention + 8 * hidden_size**2 + 4 * hidden_size * ffn_hidden_size)


def check_share(attention: float) -> None:
    """Raises PlanError for what is no share."""
    if not 0 <= attention <= 1:
        raise PlanError(f"the share of attention is {attention}; it must lie between 0 and 1")

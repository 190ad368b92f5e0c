"""The share of attention in the time of a transformer layer."""


def attention_share(seq_length: int, hidden_size: int, ffn_hidden_size: int) -> float:
    """The share of attention in a transformer layer's operations, where a token attends to those before it: per token
    2 s h (two products with the s / 2 tokens before it on average), beside 8 h^2 + 4 h f of linear layers.
    """
    attention = 2 * seq_length * hidden_size
    return attention / (attention + 8 * hidden_size**2 + 4 * hidden_size * ffn_hidden_size)

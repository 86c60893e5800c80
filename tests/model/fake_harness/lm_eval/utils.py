"""Windows over long texts."""


def get_rolling_token_windows(token_list, prefix_token, max_seq_len, context_len):
    assert context_len == 1
    tokens = [prefix_token, *token_list]
    for first in range(0, len(token_list), max_seq_len):
        last = min(first + max_seq_len, len(token_list))
        yield tokens[max(0, last - max_seq_len) : last], token_list[first:last]


def make_disjoint_window(pair):
    context, continuation = pair
    return context[: len(context) - len(continuation) + 1], continuation

"""Constraints compiled for the model echo, and its answers under them."""

from collections.abc import Collection

import numpy as np

from batchrun.checkpoint import cache_folder, resolve
from batchrun.engine.allowed import token_lists
from batchrun.engine.echo import EOS_TOKEN_ID, choose, entries
from batchrun.engine.grammar import Asked, Grammar
from batchrun.engine.request import Request
from batchrun.grammars import Grammars
from batchrun.tokenizer import EchoTokenizer


def echo_grammars() -> Grammars:
    spec = resolve("echo", revision=None, cache=cache_folder(), trust_remote_code=False).spec
    return Grammars(EchoTokenizer(), spec)


def allowed_after(grammar: Grammar, output_ids: Collection[int]) -> list[int]:
    """The tokens that may follow."""
    matcher = grammar.start()
    for token in output_ids:
        matcher.accept(token)
    return token_lists(grammar.allowed([Asked(matcher)]))[0].tolist()


def constrained_answer(request: Request, mean_output_len: int) -> list[int]:
    """The oracle: what the model answers under the request's grammar, with no engine at all."""
    assert request.grammar is not None
    matcher, tokens = request.grammar.start(), request.token_ids.tolist()
    for length in range(request.sampling.max_tokens):
        allowed = token_lists(request.grammar.allowed([Asked(matcher)]))[0]
        if length < request.sampling.min_tokens and set(allowed.tolist()) != {EOS_TOKEN_ID}:
            allowed = allowed[allowed != EOS_TOKEN_ID]
        tokens.append(choose(entries(np.array(tokens, dtype=np.int32), 0), mean_output_len, allowed))
        matcher.accept(tokens[-1])
        if tokens[-1] == EOS_TOKEN_ID or matcher.has_ended:
            break
    return tokens[len(request.token_ids) :]

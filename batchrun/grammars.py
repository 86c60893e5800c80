"""Constraints compiled to grammars: what a text must be becomes which tokens may come next. A JSON schema, a regular
expression, a choice of texts or a grammar in Lark's notation, as llguidance takes them.

Nothing is approximated: what cannot be enforced is refused. Nothing is fetched or run either: a grammar is data.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from batchrun.engine.grammar import Asked, Constraint, Matcher, TokenBits
from batchrun.errors import UsageError
from batchrun.schema_keywords import misspelt
from batchrun.tokenizer import EchoTokenizer, HFTokenizer, Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

    from batchrun.model_spec import ModelSpec

_MOST_COMPILED = 1024
# As json.dumps writes: left free, small models write line breaks for ever. A schema may say otherwise in x-guidance.
LAYOUT: "JsonCompileOptions" = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Not even where the schema asks for it: a text that follows half a schema would pass for one that follows it.
_EXACT: "JsonCompileOptions" = {"lenient": False, "coerce_one_of": False}


class ConstraintUnsupported(ValueError):
    """A constraint that is not well-formed, or that cannot be enforced; the message names what is wrong with it."""

    def __init__(self, constraint: Constraint, reason: str) -> None:
        super().__init__(f"{constraint.name} cannot be enforced: {reason}")


class Grammars:
    """Compiles constraints for one model; the last ones asked for are kept."""

    def __init__(self, tokenizer: Tokenizer, spec: "ModelSpec") -> None:
        self._tokenizer = tokenizer
        self._spec = spec
        self.compile = lru_cache(maxsize=_MOST_COMPILED)(self._compile)

    def _compile(self, constraint: Constraint) -> "CompiledGrammar":
        """The grammar of a constraint.

        Raises:
            ConstraintUnsupported: it cannot be enforced.
            UsageError: llguidance is not installed, or the tokenizer's tokens are not known to it.
        """
        # First of all, since it says what to do where llguidance is not installed.
        tokenizer = self._vocabulary
        from llguidance import LLMatcher

        if constraint.name == "json_schema" and (found := misspelt(constraint.text)) is not None:
            raise ConstraintUnsupported(
                constraint, f"{found[0]!r} is no keyword of a schema; did you mean {found[1]!r}?"
            )
        first = LLMatcher(tokenizer, _grammar_text(constraint), log_level=0)
        if first.is_error():
            raise ConstraintUnsupported(constraint, _in_a_line(first.get_error()))
        return CompiledGrammar(first, tokenizer, self._executor)

    @cached_property
    def _executor(self) -> "LLExecutor":
        """The threads in which what many rows allow is found out."""
        from llguidance import LLExecutor

        return LLExecutor()

    @cached_property
    def _vocabulary(self) -> "LLTokenizer":
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise UsageError(
                "a constraint (--json-schema, --regex, --guided-choice, --grammar) needs llguidance: "
                "pip install 'batchrun[structured]'"
            ) from error
        num_tokens = max(self._spec.vocab_size, self._tokenizer.vocab_size)
        ends = list(self._spec.eos_token_ids)
        return LLTokenizer(_described(self._tokenizer, self._spec.name), n_vocab=num_tokens, eos_token=ends)


class CompiledGrammar:
    """`engine.grammar.Grammar` by llguidance."""

    def __init__(self, first: "LLMatcher", tokenizer: "LLTokenizer", executor: "LLExecutor") -> None:
        """`first` has accepted nothing."""
        self._first = first
        self._tokenizer = tokenizer
        self._executor = executor

    def start(self) -> "TokenMatcher":
        # A copy shares what the first one has learned of the vocabulary.
        return TokenMatcher(self._first.deep_copy())

    def allowed(self, asked: list[Asked]) -> TokenBits:
        from llguidance import numpy as masks

        starts = np.cumsum([0, *(1 + len(one.draft) for one in asked)]).tolist()
        bits: TokenBits = masks.allocate_token_bitmask(starts[-1], self._tokenizer.vocab_size)
        placed = [(_inner(one.matcher), start, list(one.draft)) for one, start in zip(asked, starts, strict=False)]
        plain = [(matcher, start) for matcher, start, draft in placed if not draft]
        drafted = [each for each in placed if each[2]]
        if plain:
            masks.fill_next_token_bitmask_par(self._executor, plain, bits)
        if drafted:
            masks.fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, bits)
        return bits

    def describes(self, answer: str | Sequence[int]) -> bool:
        """Whether a text, or the tokens of one, is complete and as the grammar wants it."""
        ids = self._tokenizer.tokenize_str(answer) if isinstance(answer, str) else list(answer)
        if ids and ids[-1] in self._tokenizer.eos_tokens:
            ids = ids[:-1]
        matcher = self._first.deep_copy()
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


class TokenMatcher:
    """`engine.grammar.Matcher` by llguidance."""

    def __init__(self, inner: "LLMatcher") -> None:
        self.inner = inner

    @property
    def has_ended(self) -> bool:
        return self.inner.is_stopped()

    @property
    def failure(self) -> str | None:
        return _in_a_line(self.inner.get_error()) if self.inner.is_error() else None

    def accept(self, token: int) -> None:
        self.inner.consume_token(token)


def _inner(matcher: Matcher) -> "LLMatcher":
    assert isinstance(matcher, TokenMatcher), matcher
    return matcher.inner


def _grammar_text(constraint: Constraint) -> str:
    """What llguidance reads."""
    from llguidance import LLMatcher, grammar_from, regex_to_lark

    match constraint.name:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(constraint.text, defaults=LAYOUT, overrides=_EXACT)
        case "regex":
            # \d and \w as in the patterns of JSON schemas.
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(constraint.text, use_ascii='dw')}/")
        case "guided_choice":
            return grammar_from("choice", constraint.text)
        case "grammar":
            return LLMatcher.grammar_from_lark(constraint.text)


class _Bytes:
    """The tokens of the model echo, in the words of llguidance's `TokenizerWrapper`."""

    bos_token_id = 1
    eos_token_id = 2
    special_token_ids = (0, 1, 2)
    tokens = (b"<pad>", b"<bos>", b"<eos>", *(bytes([byte]) for byte in range(256)))

    def __call__(self, text: str | bytes) -> Sequence[int]:
        raw = text.encode() if isinstance(text, str) else text
        return [byte + 3 for byte in raw]


def _described(tokenizer: Tokenizer, model: str) -> Any:
    """The tokenizer as llguidance takes it."""
    if isinstance(tokenizer, EchoTokenizer):
        from llguidance import TokenizerWrapper

        return TokenizerWrapper(_Bytes())
    described = tokenizer.serialized() if isinstance(tokenizer, HFTokenizer) else None
    if described is None:
        raise UsageError(f"{model} has a tokenizer without a tokenizer.json, for which no constraint can be compiled")
    return described


def _in_a_line(message: str) -> str:
    """The first of an error's lines that says something; behind it is the state of the parser."""
    said = message.strip().partition("<state>")[0]
    return " ".join(said.split())

"""Rows that follow a grammar: in any batch, pool and order, resumed and guessed ahead, the tokens of the row alone."""

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from batchrun.engine.allowed import token_lists
from batchrun.engine.echo import EOS_TOKEN_ID, FIRST_BYTE, EchoRunner
from batchrun.engine.engine import Engine
from batchrun.engine.grammar import Asked, Constraint
from batchrun.engine.request import Request, SamplingParams, TokenIds
from batchrun.engine.scheduler import SchedulerConfig
from batchrun.engine.speculation import PromptLookup
from batchrun.engine.statistics import Counters
from batchrun.engine.step import Ended, ScheduledBatch
from batchrun.tokenizer import EchoTokenizer
from tests.engine.grammars import allowed_after, constrained_answer, echo_grammars
from tests.engine.test_engine_with_echo import expected, make_engine, random_prompts, requests_of, run

GRAMMARS = echo_grammars()
CONSTRAINTS = (
    Constraint("regex", "[a-f]{3,9}"),
    Constraint("regex", "(ab|cd)+x"),
    Constraint("guided_choice", '["yes", "no", "yesterday", "it is not known"]'),
    Constraint("json_schema", '{"type":"array","items":{"type":"integer","maximum":99},"maxItems":5}'),
    Constraint("json_schema", '{"enum":["good","bad",1,null]}'),
    Constraint("grammar", 'start: pair ("," pair)*\npair: /[a-z]+/ "=" /[0-9]{1,3}/'),
)
MEAN_OUTPUT_LEN = 1000


def constrained(request: Request, constraint: Constraint, **sampling: int) -> Request:
    return replace(request, grammar=GRAMMARS.compile(constraint), sampling=replace(request.sampling, **sampling))


def oracle(request: Request) -> list[int]:
    return (
        expected(request, MEAN_OUTPUT_LEN) if request.grammar is None else constrained_answer(request, MEAN_OUTPUT_LEN)
    )


class AlwaysRight(PromptLookup):
    """Guesses what the row says alone, and spoils some of it."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], seed: int) -> None:
        super().__init__()
        self._answers = answers
        self._rng = random.Random(seed)

    def propose(self, tokens: TokenIds, most: int) -> TokenIds:
        said = tuple(tokens.tolist())
        whole = next((whole for start, whole in self._answers.items() if said[: len(start)] == start), [])
        guess = [*whole[len(said) :][:most]]
        if guess and self._rng.random() < 0.5:
            guess[self._rng.randrange(len(guess))] = self._rng.randint(3, 258)
        return np.array(guess, dtype=np.int32)


def random_job(seed: int) -> Counters:
    rng = random.Random(seed)
    prompts = random_prompts(rng, rng.randint(1, 16), vocab=200)
    requests = []
    for request in requests_of(prompts, [SamplingParams(max_tokens=rng.choice([3, 20, 40])) for _ in prompts]):
        if rng.random() < 0.8:
            request = constrained(request, rng.choice(CONSTRAINTS), min_tokens=rng.choice([0, 0, 2, 8]))
        requests.append(request)
    answers = {request.row_idx: oracle(request) for request in requests}
    resumed = [
        replace(
            request, output_ids=tuple(answers[request.row_idx][: rng.randint(0, len(answers[request.row_idx]) - 1)])
        )
        if rng.random() < 0.3
        else request
        for request in requests
    ]
    block_size = rng.choice([1, 4, 16])
    fewest = -(-max(request.max_len for request in requests) // block_size)
    engine = make_engine(
        fewest + rng.choice([0, 2, 60]),
        block_size=block_size,
        mean_output_len=MEAN_OUTPUT_LEN,
        num_host_slots=rng.choice([0, 200]),
        max_num_seqs=rng.choice([1, 4, 32]),
        max_num_batched_tokens=rng.choice([1, 16, 63]),
        preemption=rng.choice(["auto", "recompute", "swap"]),
        overlaps=rng.random() < 0.5,
        num_free_tokens=rng.choice([0, 16, 100]),
    )
    by_prompt = {tuple(one.token_ids.tolist()): [*one.token_ids.tolist(), *answers[one.row_idx]] for one in requests}
    engine.scheduler.speculation.lookup = partial(AlwaysRight, by_prompt, seed)
    done = run(engine, resumed)
    assert {row: list(completion.token_ids) for row, completion in done.items()} == answers
    return engine.statistics().counters


def test_random_jobs_answer_like_the_row_alone() -> None:
    """Preempted both ways, resumed in the middle of a text, with drafts that are right and wrong, beside free rows."""
    counters = [random_job(seed) for seed in range(200)]
    assert sum(counter.recompute_preemptions for counter in counters) > 0
    assert sum(counter.swap_preemptions for counter in counters) > 0
    num_accepted = sum(counter.accepted_tokens for counter in counters)
    assert sum(counter.drafted_tokens for counter in counters) > num_accepted > 0


def one(constraint: Constraint, max_tokens: int = 40, **sampling: int) -> Request:
    request = Request(0, np.array([9, 8, 7], dtype=np.int32), SamplingParams(max_tokens=max_tokens))
    return constrained(request, constraint, **sampling)


def answered(request: Request, **options: int) -> tuple[str, str]:
    """Text and reason of the end."""
    completion = run(make_engine(60, mean_output_len=3, **options), [request])[0]
    assert completion.error is None
    return EchoTokenizer().decode(completion.token_ids), completion.finish_reason


def test_a_row_ends_with_its_grammar_and_not_before() -> None:
    assert answered(one(Constraint("regex", "[a-f]{30}")))[1] == "stop"
    assert len(answered(one(Constraint("regex", "[a-f]{30}")))[0]) == 30
    assert answered(one(Constraint("regex", "[a-f]{30}"), max_tokens=11))[1] == "length"


def test_the_end_of_a_grammar_takes_no_step_of_its_own() -> None:
    engine = make_engine(60)
    run(engine, [one(Constraint("regex", "abcd"))])
    assert engine.statistics().counters.steps == 4


def test_min_tokens_keeps_a_text_going_as_long_as_its_grammar_can() -> None:
    lengths = {
        least: len(answered(one(Constraint("regex", "[a-f]{2,9}"), min_tokens=least))[0]) for least in (0, 6, 30)
    }
    assert lengths[0] < 6 <= lengths[6]
    assert lengths[30] == 9


def test_a_row_whose_grammar_gives_up_fails_by_name() -> None:
    """Here it is told a token that it never allowed."""
    good, bad = one(Constraint("regex", "[a-f]{5}")), replace(one(Constraint("regex", "[a-f]{7}")), row_idx=1)
    done = run(make_engine(60), [good, replace(bad, output_ids=(FIRST_BYTE + ord("z"),))])
    assert (done[0].error, done[0].finish_reason) == (None, "stop")
    assert done[1].error is not None
    assert done[1].error.type == "schema_unsupported"
    assert "doesn't satisfy the grammar" in done[1].error.message
    assert "<state>" not in done[1].error.message


class FailsOn(EchoRunner):
    """A device that breaks while it computes one row."""

    def __init__(self, row: int) -> None:
        super().__init__(200, 4, mean_output_len=MEAN_OUTPUT_LEN)
        self._row = row

    def launch(self, batch: ScheduledBatch) -> Ended:
        for item in batch.items:
            if item.sequence.request.row_idx == self._row and item.output_len >= 2:
                raise RuntimeError("broken")
        return super().launch(batch)


def test_rows_go_on_where_their_grammar_was_when_another_row_fails() -> None:
    requests = [
        replace(one(Constraint("regex", "[a-f]{6}")), row_idx=row, token_ids=np.array([5, row + 3], np.int32))
        for row in range(4)
    ]
    runner = FailsOn(2)
    config = SchedulerConfig(200, 0, 4, runner.block_bytes, 8, 16, frozenset({EOS_TOKEN_ID}))
    done = run(Engine(config, runner, decode=str), requests)
    assert done[2].error is not None
    assert {row: list(done[row].token_ids) for row in (0, 1, 3)} == {row: oracle(requests[row]) for row in (0, 1, 3)}


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda one: one.text[:12])
def test_what_is_allowed_before_a_draft_is_what_is_allowed_without_it(constraint: Constraint) -> None:
    grammar = GRAMMARS.compile(constraint)
    draft = constrained_answer(one(constraint, max_tokens=6), MEAN_OUTPUT_LEN)
    drafted = token_lists(grammar.allowed([Asked(grammar.start(), tuple(draft))]))
    assert [list(row) for row in drafted[: len(draft)]] == [
        allowed_after(grammar, draft[:at]) for at in range(len(draft))
    ]

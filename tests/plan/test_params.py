"""A row's own sampling parameters."""

import json

import pytest

from batchrun.engine.request import SamplingParams
from batchrun.plan.params import ParamsReader, merged

BASE = SamplingParams(max_tokens=64, stop=("END",))


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (None, None),
        ("", None),
        ("null", None),
        ({}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": 64, "temperature": 0, "stop": ["END"]}, None),
        ({"temperature": 0.5, "max_tokens": 8.0}, '{"max_tokens":8,"temperature":0.5}'),
        ('{"temperature": 0.50, "max_tokens": 8}', '{"max_tokens":8,"temperature":0.5}'),
        ([("top_k", 5.0), ("min_p", None)], '{"top_k":5}'),
        ({"stop": "x", "stop_token_ids": [1, 2]}, '{"stop":["x"],"stop_token_ids":[1,2]}'),
        ({"ignore_eos": True}, '{"ignore_eos":true}'),
    ],
)
def test_cell_becomes_canonical_overrides(cell: object, expected: str | None) -> None:
    assert ParamsReader(BASE).overrides(cell) == expected


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ({"temprature": 1}, "unknown key 'temprature'; did you mean 'temperature'?"),
        ({"xyzzy": 1}, "unknown key 'xyzzy'; there are max_tokens, "),
        ({"max_tokens": 0}, "max_tokens should be greater than or equal to 1, not 0"),
        ({"max_tokens": 1.5}, "max_tokens should be a whole number, not"),
        ({"top_p": float("nan")}, "top_p should be "),
        ({"temperature": "hot"}, "temperature should be a number, not 'hot'"),
        ({"stop": [1]}, "stop should be "),
        ({"logit_bias": '{"a":' * 2_000}, "logit_bias should be JSON, an object of token ids"),
        ({"stop": [""]}, "stop holds an empty text"),
        ({"min_tokens": 65}, "min_tokens 65 is more than max_tokens 64"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "should be an object with parameters such as max_tokens, not list"),
        (7, "not int"),
    ],
)
def test_bad_cell_says_what_is_wrong(cell: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ParamsReader(BASE).overrides(cell)


def test_merged_parameters_are_the_jobs_with_the_rows_over_them() -> None:
    cell = {"temperature": 0.5, "stop": ["x", "y"], "seed": 7}
    params = ParamsReader(BASE).overrides(json.dumps(cell))
    assert merged(BASE, params) == SamplingParams(max_tokens=64, temperature=0.5, stop=("x", "y"), seed=7)
    assert merged(BASE, None) is BASE

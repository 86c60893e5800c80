"""What `batchrun_jobs.quality` reads off a model is what its own code gives."""

import math

import numpy as np
import pytest
import torch

from batchrun.engine.model import Model
from batchrun.errors import DataError
from batchrun_jobs.quality import Reading, read, report
from tests.device.family_matrix import logits_alone, make_prompts
from tests.device.tiny_families import make_model


def test_perplexity_and_likeliest_tokens_are_the_models_own() -> None:
    prompts, module = make_prompts(), make_model("llama")
    expected = [logits[:-1] for logits in logits_alone(module, prompts)]
    got = read(Model.adopt(module), [np.array(ids, np.int32) for ids in [*prompts, [5]]])
    logits = torch.cat(expected).double()
    following = torch.tensor([token for ids in prompts for token in ids[1:]])
    assert got.perplexity == pytest.approx(math.exp(torch.nn.functional.cross_entropy(logits, following)), rel=1e-4)
    assert torch.equal(got.likeliest, logits.argmax(-1))


def test_texts_without_a_second_token_are_refused() -> None:
    with pytest.raises(DataError, match="no text has two tokens"):
        read(Model.adopt(make_model("llama")), [np.array([5], np.int32)])


def test_the_report_says_what_changed() -> None:
    plain = Reading(torch.tensor([1.0, 3.0], dtype=torch.float64), torch.tensor([4, 5]))
    rounded = Reading(torch.tensor([1.0, 3.2], dtype=torch.float64), torch.tensor([4, 6]))
    assert report(plain, rounded, "int8").splitlines() == [
        "2 positions",
        "perplexity  none 7.3891  int8 8.1662  (+10.52%)",
        "same likeliest token  50.00%",
    ]

"""batchrun as a model of EleutherAI's harness, on the real model: what transformers makes of the same tokens.

The harness is a stand-in where it is not installed; `python -m tests.endurance.inside_harness` takes the real one.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchrun.checkpoint import cache_folder, resolve
from batchrun.errors import DataError, UsageError
from batchrun.quiet import quiet_transformers
from tests.run.conftest import environment

ROOT = Path(__file__).parents[2]
FAKE = Path(__file__).parent / "fake_harness"
PAIRS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " London, I think"),
    ("The capital of France is ", "Paris"),
    ("", "Bees make honey."),
    ("Bees make", " honey and wax."),
]
TEXTS = ["Bees make honey. " * 9, "One word.", "Bees make honey. " * 9]
WINDOW = 16


@pytest.fixture(scope="module")
def harness() -> Any:
    """The module `batchrun.harness`, imported beside a harness."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("lm_eval") is None:
            patch.syspath_prepend(FAKE)
        yield importlib.import_module("batchrun.harness")


@pytest.fixture(scope="module")
def plain() -> Any:
    """Tokenizer and model of transformers."""
    folder = resolve(None, revision=None, cache=cache_folder(), trust_remote_code=False).folder
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        return SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(folder), model=model)


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=each) for each in arguments]


def scored(plain: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Log-likelihood and greediness by one forward pass over these tokens alone."""
    with torch.inference_mode():
        logits = plain.model(torch.tensor([[*context, *continuation]])).logits[0]
    logprobs = logits.log_softmax(-1)[len(context) - 1 : -1]
    wanted = torch.tensor(continuation)
    found = logprobs.gather(1, wanted[:, None])
    return float(found.sum()), bool((logprobs.argmax(-1) == wanted).all())


def test_continuations_have_the_models_own_log_likelihoods(harness: Any, plain: Any) -> None:
    lm = harness.BatchrunLM()
    found = lm.loglikelihood(requests(*PAIRS), disable_tqdm=True)
    encode = plain.tokenizer.encode
    for (context, text), (logprob, is_greedy) in zip(PAIRS, found, strict=True):
        head = encode(context.rstrip()) if context else [plain.tokenizer.bos_token_id]
        tail = encode(context + text)[len(head) if context else 0 :]
        expected, expected_greedy = scored(plain, head, tail)
        assert logprob == pytest.approx(expected, abs=1e-4 * len(tail))
        assert is_greedy == expected_greedy
    assert any(is_greedy for _, is_greedy in found)
    if FAKE.as_posix() in str(sys.modules["lm_eval"].__file__):
        assert lm.cache_hook.told == [("loglikelihood", *each) for each in zip(PAIRS, found, strict=True)]


def test_what_is_too_long_loses_its_beginning(harness: Any, plain: Any) -> None:
    encode = plain.tokenizer.encode
    # What the harness adds where nobody says anything.
    lm = harness.BatchrunLM(max_length=WINDOW, device="cuda", batch_size=1)
    found = lm.loglikelihood(requests((TEXTS[0], " Or wax.")), disable_tqdm=True)
    ids = encode(TEXTS[0].rstrip())
    tail = encode(TEXTS[0] + " Or wax.")[len(ids) :]
    expected, _ = scored(plain, ids[-(WINDOW + 1 - len(tail)) :], tail)
    assert found[0][0] == pytest.approx(expected, abs=1e-4 * len(tail))


def test_whole_texts_are_scored_in_windows(harness: Any, plain: Any) -> None:
    lm = harness.BatchrunLM(max_length=WINDOW)
    found = lm.loglikelihood_rolling(requests(*((text,) for text in TEXTS)), disable_tqdm=True)
    for text, logprob in zip(TEXTS, found, strict=True):
        ids = plain.tokenizer.encode(text)
        expected, all_ids = 0.0, [plain.tokenizer.bos_token_id, *ids]
        for first in range(0, len(ids), WINDOW):
            last = min(first + WINDOW, len(ids))
            begin = max(0, last - WINDOW)
            expected += scored(plain, all_ids[begin : first + 1], ids[first:last])[0]
        assert logprob == pytest.approx(expected, abs=1e-4 * len(ids))
    assert found[0] == found[2]


def test_answers_end_where_the_task_says(harness: Any, plain: Any) -> None:
    prompt = "Bees make honey. Bees make honey. Bees make"
    asked = [
        (prompt, {"until": ["\n"], "max_gen_toks": 3, "do_sample": False, "temperature": 0.7}),
        (prompt, {"until": "Bees", "max_tokens": 12}),
        (prompt, {"until": [], "max_gen_toks": 12}),
    ]
    found = harness.BatchrunLM().generate_until(requests(*asked), disable_tqdm=True)
    encoded = plain.tokenizer(prompt, return_tensors="pt")
    out = plain.model.generate(**encoded, max_new_tokens=12, do_sample=False, pad_token_id=0)
    ids = out[0, encoded["input_ids"].shape[1] :]
    whole = plain.tokenizer.decode(ids)
    assert found == [plain.tokenizer.decode(ids[:3]), whole.split("Bees")[0], whole]


def test_sampled_answers_differ_from_repeat_to_repeat(harness: Any) -> None:
    asked = [("A name:", {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0})] * 4
    assert len({*harness.BatchrunLM().generate_until(requests(*asked), disable_tqdm=True)}) > 1


def test_conversations_go_through_the_models_template(harness: Any, plain: Any) -> None:
    lm = harness.BatchrunLM()
    history = [{"role": "user", "content": "Hello"}]
    expected = plain.tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
    assert lm.apply_chat_template(history) == expected
    # It begins with BOS, which must not be put in front once more.
    assert lm.tok_encode(expected) == plain.tokenizer.encode(expected, add_special_tokens=False)


@pytest.mark.parametrize("add_bos_token", [False, True])
def test_bos_stands_before_texts_where_that_is_asked_for(harness: Any, plain: Any, add_bos_token: bool) -> None:
    lm = harness.BatchrunLM(add_bos_token=add_bos_token)
    expected = plain.tokenizer.encode("Bees make honey.", add_special_tokens=False)
    bos = plain.tokenizer.bos_token_id
    assert lm.tok_encode("Bees make honey.") == [bos] * add_bos_token + expected
    found = lm.loglikelihood(requests(("Bees make", " honey.")), disable_tqdm=True)
    head = [bos] * add_bos_token + plain.tokenizer.encode("Bees make", add_special_tokens=False)
    logprob, _ = scored(plain, head, expected[len(head) - add_bos_token :])
    assert found[0][0] == pytest.approx(logprob, abs=1e-4)


def test_nothing_is_asked_of_the_model_where_there_are_no_requests(harness: Any) -> None:
    lm = harness.BatchrunLM()
    assert (lm.loglikelihood([]), lm.loglikelihood_rolling([]), lm.generate_until([])) == ([], [], [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 3}, "'max_tokens' is no option of batchrun under the harness"),
        ({"max_length": 10**9}, "--max-model-len 1,000,000,000 is more than"),
        ({"think_end_token": 7}, "think_end_token=7 should be a text"),
        ({"pretrained": "echo"}, "echo has no tokenizer of transformers"),
    ],
)
def test_options_that_cannot_be_used_are_refused(harness: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        harness.BatchrunLM(**options)


def test_generation_arguments_that_mean_nothing_are_refused(harness: Any) -> None:
    lm = harness.BatchrunLM(max_length=64)
    with pytest.raises(UsageError, match="'num_beams' is none of batchrun's"):
        lm.generate_until(requests(("A", {"num_beams": 2})))
    with pytest.raises(DataError, match="max_gen_toks 64 leaves no room"):
        lm.generate_until(requests(("A", {"max_gen_toks": 64})))


def command(*arguments: str, path: str) -> subprocess.CompletedProcess[str]:
    env = environment() | {"PYTHONPATH": path + ":" + environment()["PYTHONPATH"]}
    run = [sys.executable, "-m", "batchrun", "lm-eval", *arguments]
    return subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_the_command_passes_everything_on(tmp_path: Path) -> None:
    given = ["run", "--model", "batchrun", "--model_args", "max_length=64", "--tasks", "a,b", "--help"]
    done = command(*given, path=str(FAKE))
    assert (done.stdout, done.returncode) == (f"{['lm-eval', *given]} ['batchrun']\n", 0)


def test_without_the_harness_the_command_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "lm_eval.py").write_text("raise ImportError('no harness')\n")
    done = command("run", path=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == (
        "error: EleutherAI's harness is not installed (no harness): pip install 'batchrun[lm-eval]', or pip install "
        "lm-eval\n"
    )

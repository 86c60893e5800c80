"""Whole jobs on a tiny model with states, from its files: killed and gone on with, sampled, scored and chosen."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from batchrun import lifecycle
from batchrun.errors import ModelUnavailable, StoppedEarly, UsageError
from batchrun.job import Job
from batchrun.observe.events import Event, Message, RunProgress
from batchrun.planning import plan, tune
from batchrun.stop import AT_ONCE, StopRequest
from batchrun.tune.choice import Weights
from tests.device.tiny_families import VOCAB, WIDE, make_model
from tests.run.conftest import ignore

MAX_TOKENS = 20
# The first ones are equal, others begin alike.
PROMPTS = ["abc", "abc", *(f"one two three {'x' * number} {number}" for number in range(20))]
SMALL = {"kv_cache_memory": "20KiB", "max_num_seqs": 6, "max_num_batched_tokens": 9, "block_size": 4}


class Rows:
    """A folder with an input, and jobs over it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"prompt": PROMPTS, "target": [" yes"] * len(PROMPTS)}), folder / "input.parquet")
        self.events: list[Event] = []

    def job(self, **options: Any) -> Job:
        given = {"inputs": (str(self.folder / "input.parquet"),), "output": str(self.folder / "out")}
        return Job.load(given | {"model": str(self.model), "prompt_col": "prompt"} | options)

    def submit(self, stop: StopRequest | None = None, **options: Any) -> Any:
        return lifecycle.submit(self.job(**options), self.events.append, stop or StopRequest())

    def generate(self, stop: StopRequest | None = None, **options: Any) -> Any:
        return self.submit(stop, **{"max_tokens": MAX_TOKENS} | options)

    @property
    def rows(self) -> list[dict[str, Any]]:
        files = sorted((self.folder / "out").glob("*.parquet"))
        return pa.concat_tables([pq.read_table(file) for file in files]).to_pylist()

    @property
    def said(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Message)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens are letters, as it lies in a folder."""
    folder = tmp_path_factory.mktemp("lfm2")
    make_model("lfm2", **WIDE, seed=3).save_pretrained(folder)
    letters = {letter: 3 + at for at, letter in enumerate("abcdefghijklmnopqrstuvwxyz 0123456789")}
    letters |= {"<pad>": 0, "<s>": 1, "</s>": 2} | {chr(0x4E00 + number): number for number in range(40, VOCAB)}
    backend = Tokenizer(models.WordLevel(letters, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    return folder


@pytest.fixture
def rows(tmp_path: Path, model: Path) -> Rows:
    return Rows(tmp_path / "rows", model)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[str]:
    """What transformers generates."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    plain: Any = AutoModelForCausalLM.from_pretrained(model)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            output = plain.generate(ids, max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=2, pad_token_id=0)
        found.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
    return found


def test_rows_are_answered_as_transformers_does_and_share_nothing(rows: Rows, texts: list[str]) -> None:
    outcome = rows.generate(prefix_caching="on")
    assert [row["text"] for row in rows.rows] == texts
    assert {row["cached_tokens"] for row in rows.rows} == {0}
    assert (outcome.cached_tokens, outcome.drafted_tokens) == (0, 0)
    assert [text for text in rows.said if text.startswith("prefix caching is off: the model keeps states")]


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_job_stopped_in_the_middle_of_its_rows_is_gone_on_with(rows: Rows, texts: list[str], preemption: str) -> None:
    class After(StopRequest):
        asked = 0

        @property
        def level(self) -> int:
            self.asked += 1
            return AT_ONCE if self.asked > 150 else 0

        @level.setter
        def level(self, level: int) -> None:
            """Nobody asks but the clock."""

    num_stopped = 0
    while True:
        try:
            rows.generate(After(), preemption=preemption, **SMALL)
            break
        except StoppedEarly:
            num_stopped += 1
    assert num_stopped > 0
    counters = [event.statistics.counters for event in rows.events if isinstance(event, RunProgress)]
    assert sum(getattr(each, f"{preemption}_preemptions") for each in counters) > 0
    assert [row["text"] for row in rows.rows] == texts


def test_samples_and_their_single_runs_are_the_same(rows: Rows, model: Path) -> None:
    rows.generate(n=3, temperature=1.0, seed=5)
    together = [row["text"] for row in rows.rows]
    assert len({*together}) > len(PROMPTS)
    for sample in range(3):
        alone = Rows(rows.folder / str(sample), model)
        alone.generate(temperature=1.0, seed=5 + sample)
        assert [row["text"] for row in alone.rows] == together[sample::3]


def test_choices_are_as_likely_as_they_are_as_targets(rows: Rows, model: Path) -> None:
    """Chains of choices have a beginning in common, which each computes for itself."""
    choices = [" yes", " yet", " no", " y"]
    rows.submit(task="choose", choice=choices, **SMALL)
    chosen = [row["choice_logprobs"] for row in rows.rows]
    for at, choice in enumerate(choices):
        scored = Rows(rows.folder / str(at), model)
        pq.write_table(
            pa.table({"prompt": PROMPTS, "target": [choice] * len(PROMPTS)}), scored.folder / "input.parquet"
        )
        scored.submit(task="score", target_col="target")
        likely = [row["target_logprob"] for row in scored.rows]
        assert [each[at] for each in chosen] == pytest.approx(likely, abs=1e-4)


def test_what_is_foretold_and_shown_counts_every_prompt(rows: Rows) -> None:
    """Nothing is shared, and no measured time would be of any use."""
    pq.write_table(pa.table({"prompt": [f"{'x' * 100} {row}" for row in range(60)]}), rows.folder / "input.parquet")
    summary = plan(rows.job(max_tokens=4, max_num_seqs=8), ignore, StopRequest()).summary
    assert summary.peak_kv_bytes >= 8 * 100 * summary.kv_bytes_per_token
    rows.generate(max_tokens=4, ignore_eos=True, **SMALL | {"kv_cache_memory": "200KiB"})
    shown = [event for event in rows.events if isinstance(event, RunProgress)]
    assert shown[-1].tokens_total >= 60 * 100
    assert all(event.tokens_done < event.tokens_total for event in shown if event.rows_done < 60)


def test_beams_are_refused_when_it_is_planned(rows: Rows) -> None:
    with pytest.raises(UsageError, match="keeps states, which beams cannot fork"):
        rows.generate(num_beams=2)


def test_what_its_configuration_rules_out_is_refused_when_it_is_planned(rows: Rows) -> None:
    """It was only when the weights were loaded, and the job was left to be resumed in vain."""
    for options, why in (
        ({"deterministic": True}, "keeps states, for which --deterministic is not proven"),
        ({"tensor_parallel": 2}, "leave out --tensor-parallel"),
    ):
        for begin in (
            lambda options=options: plan(rows.job(**options), ignore, StopRequest()),
            lambda options=options: rows.generate(**options),
        ):
            with pytest.raises(ModelUnavailable, match=why):
                begin()
    assert not (rows.folder / "out.batchrun").exists()


def test_two_engines_are_refused_before_anything_is_planned(rows: Rows) -> None:
    with pytest.raises(UsageError, match="keeps states, which --disaggregate cannot hand over; leave it out"):
        rows.generate(disaggregate=True)
    assert not [*rows.folder.glob("*.batchrun/plan")]


def test_its_steps_are_not_measured(rows: Rows) -> None:
    with pytest.raises(ModelUnavailable, match="keeps states"):
        tune(rows.job(), Weights(), True, ignore)

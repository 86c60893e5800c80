"""A job that copies what an earlier one has answered: the same result as without it, and only the new rows computed."""

import errno

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import lifecycle, planning
from batchrun.engine.echo import EchoRunner
from batchrun.engine.step import NO_TOKEN
from batchrun.errors import AnswersDiffer, InputMissing, UsageError
from batchrun.observe.events import Message
from batchrun.plan import units
from batchrun.retry import retry
from batchrun.stop import StopRequest
from batchrun.store.layout import Layout
from batchrun.store.reused import read_reused
from batchrun.store.store import Store
from batchrun.store.verify import verify
from tests.run.conftest import EchoJob, echo_text, ignore
from tests.run.test_kill import REST, SLOW, committed, kill_again_and_again

CHOOSE = {"task": "choose", "choice": ["yes", "no", "not at all"]}


def nights(make_job, tmp_path, num_rows=200, num_new=10, num_gone=6):
    """Yesterday's job, and today's: some rows at random places are new, some are gone, the others in another order."""
    yesterday = make_job(num_rows, tmp_path / "yesterday")
    rng = np.random.default_rng(5)
    prompts = [*rng.permutation(yesterday.prompts[num_gone:]).tolist(), *(f"New {row}?" for row in range(num_new))]
    prompts = rng.permutation(prompts).tolist()
    return yesterday, day(tmp_path / "today", prompts)


def day(folder, prompts, **columns):
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({"prompt": prompts, **columns}), folder / "input.parquet")
    return EchoJob(folder, prompts)


def test_a_second_night_with_five_percent_new_rows_does_five_percent_of_the_work(echo_job, tmp_path):
    yesterday, today = nights(echo_job, tmp_path, num_rows=2000, num_new=100, num_gone=0)
    first = yesterday.submit(max_tokens=40)
    second = today.submit(max_tokens=40, reuse=str(yesterday.out))
    new = [prompt for prompt in today.prompts if prompt.startswith("New")]
    assert (second.rows, second.reused, second.vanished) == (2100, 2000, 0)
    assert second.prompt_tokens == sum(len(prompt) + 1 for prompt in new)
    assert second.output_tokens < 0.08 * first.output_tokens
    assert [row["text"] for row in today.rows()] == [echo_text(prompt, 40) for prompt in today.prompts]


def test_the_result_is_byte_for_byte_the_one_that_would_have_been_computed(echo_job, tmp_path, monkeypatch):
    """In several units, with duplicates, failed rows and parameters by row."""
    monkeypatch.setattr(units, "MIN_UNIT_ROWS", 16)
    monkeypatch.setattr(units, "UNIT_TOKENS", 4000)
    monkeypatch.setattr(units.UnitWriter.__init__, "__defaults__", (4000,))
    prompts = [*echo_job(150, tmp_path / "p").prompts, "", None]
    params = ['{"max_tokens": 5}' if row % 3 == 0 else None for row in range(152)]
    yesterday = day(tmp_path / "yesterday", prompts[:100], params=params[:100])
    yesterday.submit(params_col="params")
    reusing, computing = (day(tmp_path / name, prompts, params=params) for name in ("reusing", "computing"))
    computing.submit(params_col="params")
    outcome = reusing.submit(params_col="params", reuse=str(yesterday.out), output_prefix="")
    assert outcome.reused >= 100
    assert outcome.errors == {"empty_prompt": 2}
    assert reusing.result() == computing.result()
    assert verify(reusing.out).is_ok


@pytest.mark.parametrize(
    "options",
    [{"task": "score", "target_col": "target"}, {"task": "embed", "pooling": "mean"}, {"task": "embed"}, CHOOSE],
    ids=["score", "mean", "last", "choose"],
)
def test_so_it_is_for_rows_that_are_read(tmp_path, options):
    prompts = [f"{'the same beginning ' * (row % 4)}{row % 50}" for row in range(70)]
    targets = [f" {'ab' * (row % 3)} {row}" for row in range(70)]
    yesterday = day(tmp_path / "yesterday", prompts[:50], target=targets[:50])
    yesterday.submit(**options)
    reusing, computing = (day(tmp_path / name, prompts, target=targets) for name in ("reusing", "computing"))
    computing.submit(**options)
    assert reusing.submit(reuse=str(yesterday.out), **options).reused >= 50
    assert reusing.result() == computing.result()


def test_rows_that_vanished_are_counted_and_kept_in_a_file(echo_job, tmp_path):
    yesterday, today = nights(echo_job, tmp_path)
    yesterday.submit()
    events = []
    outcome = lifecycle.submit(today.job(reuse=str(yesterday.out)), events.append, StopRequest())
    gone = [row for row, prompt in enumerate(yesterday.prompts) if prompt not in today.prompts]
    vanished = pq.read_table(Layout(today.out).vanished)
    assert 0 < len(gone) == outcome.vanished
    assert vanished.column("row_idx").to_pylist() == gone
    assert vanished.column("text").to_pylist() == [echo_text(yesterday.prompts[row], 256) for row in gone]
    said = [event.text for event in events if isinstance(event, Message) and "answered by" in event.text]
    assert said == [
        f"{outcome.reused} of {len(today.prompts)} rows are answered by {yesterday.out}; "
        f"{len(gone)} of its rows are not in the input any more, see {Layout(today.out).vanished}"
    ]


def test_a_row_that_was_retried_in_another_way_is_computed_again_and_has_not_vanished(echo_job, tmp_path):
    yesterday, _ = nights(echo_job, tmp_path)
    yesterday.submit(max_tokens=5)
    retry(yesterday.out, "row_idx < 3", {"max_tokens": 9}, ignore, StopRequest())
    prompts = yesterday.prompts
    outcome = day(tmp_path / "again", prompts).submit(max_tokens=5, reuse=str(yesterday.out))
    assert 0 < len(prompts) - outcome.reused <= 3 * max(map(prompts.count, prompts))
    assert outcome.vanished == 0


def test_a_plan_foresees_what_will_be_copied(echo_job, tmp_path):
    yesterday, today = nights(echo_job, tmp_path)
    yesterday.submit()
    events = []
    planning.plan(today.job(reuse=str(yesterday.out)), events.append, StopRequest())
    said = [event.text for event in events if isinstance(event, Message)]
    outcome = today.submit(reuse=str(yesterday.out))
    assert said == [f"{outcome.reused} of {outcome.rows} rows are answered by {yesterday.out}"]


def test_a_sampled_row_is_copied_only_where_it_keeps_its_number(echo_job, tmp_path):
    """Its randomness is made of it: elsewhere the same prompt gets another answer."""
    prompts = [f"Prompt {row}" for row in range(30)]
    yesterday = day(tmp_path / "yesterday", prompts)
    yesterday.submit(temperature=0.7)
    longer = day(tmp_path / "longer", [*prompts, "one more"])
    assert longer.submit(temperature=0.7, reuse=str(yesterday.out)).reused == 30
    shifted = day(tmp_path / "shifted", ["one more", *prompts])
    outcome = shifted.submit(temperature=0.7, reuse=str(yesterday.out))
    assert (outcome.reused, outcome.vanished) == (0, 0)


def test_a_row_that_failed_in_the_engine_is_computed_again(echo_job, tmp_path, monkeypatch):
    yesterday = day(tmp_path / "yesterday", [f"Prompt {row}" for row in range(30)])
    launch = EchoRunner.launch

    def poison(self, batch):
        ended = launch(self, batch)
        for place, item in enumerate(batch.sampled):
            if item.sequence.request.row_idx == 7:
                ended.sampled.tokens[place] = NO_TOKEN
        return ended

    with monkeypatch.context() as patched:
        patched.setattr(EchoRunner, "launch", poison)
        assert yesterday.submit().errors == {"engine_error": 1}
    today = day(tmp_path / "today", yesterday.prompts)
    outcome = today.submit(reuse=str(yesterday.out))
    assert (outcome.reused, outcome.num_failed, outcome.vanished) == (29, 0, 0)
    assert [row["text"] for row in today.rows()] == [echo_text(prompt, 256) for prompt in today.prompts]


def test_an_unfinished_job_gives_what_it_has(echo_job, tmp_path):
    yesterday, today = nights(echo_job, tmp_path)
    with pytest.raises(Exception, match="committed"):
        yesterday.submit(StoppedSoon(), max_num_seqs=4)
    store = Store.open(yesterday.out)
    assert 0 < store.num_done() < 200
    outcome = today.submit(reuse=str(yesterday.out))
    assert 0 < outcome.reused <= store.num_done() + 30
    assert [row["text"] for row in today.rows()] == [echo_text(prompt, 256) for prompt in today.prompts]


class StoppedSoon(StopRequest):
    """Raised in the middle of the run, by the number of times it is asked."""

    num_asked = 0

    @property
    def level(self):
        self.num_asked += 1
        return 2 if self.num_asked > 60 else 0

    @level.setter
    def level(self, value):
        pass


@pytest.mark.parametrize(
    ("options", "differing"),
    [({"max_tokens": 9}, "max_tokens"), ({"seed": 3, "temperature": 1.0}, "seed, temperature"),
     ({"model": None}, "model")],
)  # fmt: skip
def test_other_answers_are_refused_by_what_differs(echo_job, tmp_path, options, differing):
    yesterday, today = nights(echo_job, tmp_path)
    yesterday.submit()
    with pytest.raises(
        AnswersDiffer, match=rf"not those of this job \(differing: {differing}\); give the same options"
    ):
        today.submit(reuse=str(yesterday.out), **options)
    assert not Layout(today.out).folder.exists()


def test_a_job_that_is_not_there_and_the_output_itself_are_refused(echo_job, tmp_path):
    today = echo_job(10)
    with pytest.raises(InputMissing, match=r"--reuse .*/none: .*/none.batchrun holds no job with a plan; name the"):
        today.submit(reuse=str(tmp_path / "none"))
    with pytest.raises(UsageError, match="is the output itself"):
        today.submit(reuse=str(today.out))


def test_the_earlier_job_may_go_once_its_answers_are_copied(echo_job, tmp_path):
    yesterday, today = nights(echo_job, tmp_path)
    yesterday.submit()
    today.submit(reuse=str(yesterday.out))
    before = today.result()
    Layout(yesterday.out).folder.rename(tmp_path / "elsewhere")
    assert today.submit(reuse=str(yesterday.out)).already_complete
    assert today.result() == before
    with pytest.raises(InputMissing):
        today.submit(reuse=str(yesterday.out), overwrite=True)
    assert today.result() == before


def test_a_temporary_folder_that_cannot_be_removed_is_no_harm(echo_job, tmp_path, monkeypatch):
    """It was a traceback; whoever takes the lock next sweeps it."""
    monday, tuesday = nights(echo_job, tmp_path)
    monday.submit(max_tokens=9)

    def refuse(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr("batchrun.reuse.remove", refuse)
    assert tuesday.submit(max_tokens=9, reuse=str(monday.out)).reused


def test_a_job_killed_while_it_copies_and_computes_ends_like_one_that_never_was(echo_job, tmp_path):
    yesterday, today = nights(echo_job, tmp_path, num_rows=1500, num_new=1500)
    assert yesterday.call("submit", *REST).returncode == 0
    undisturbed = day(tmp_path / "undisturbed", today.prompts)
    arguments = (*SLOW, "--reuse", str(yesterday.out))
    assert undisturbed.call("submit", *REST, "--reuse", str(yesterday.out)).returncode == 0
    num_done = [0]

    def is_done() -> bool:
        num_done.append(len(committed(today)))
        assert num_done == sorted(num_done), "a committed row was lost"
        return today.out.exists()

    kill_again_and_again(today, ("submit", *arguments), 3, Layout(today.out).parts.exists, is_done)
    done = today.call("submit", *arguments)
    assert done.returncode == 0, done.stderr
    assert today.result() == undisturbed.result()
    assert read_reused(Layout(today.out)) == read_reused(Layout(undisturbed.out))

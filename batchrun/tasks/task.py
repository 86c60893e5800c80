"""The tasks under one name: which columns a job's task adds, and what runs it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from batchrun.engine.request import Completion, Request, SamplingParams
from batchrun.errors import RowError
from batchrun.grammars import Grammars
from batchrun.job import Job
from batchrun.tasks import choose, embed, generate, score
from batchrun.tasks.choose import ChooseTask
from batchrun.tasks.embed import EmbedTask
from batchrun.tasks.generate import GenerateTask, PlannedRow
from batchrun.tasks.score import ScoreTask

if TYPE_CHECKING:
    from batchrun.model_spec import ModelSpec
    from batchrun.tokenizer import Tokenizer


class Task(Protocol):
    """What is asked of the model for each row.

    Each row of the input has `num_samples`, each of these `num_beams`. `can_resume`: its unfinished rows go on from
    saved tokens.
    """

    sampling: SamplingParams

    @property
    def num_samples(self) -> int: ...

    @property
    def num_beams(self) -> int: ...

    @property
    def can_resume(self) -> bool: ...

    def requests(self, row: PlannedRow, output_ids: tuple[int, ...] = ()) -> tuple[Request, ...]:
        """What to run for a row, in the order in which it shares; `output_ids` it has generated before go on."""
        ...

    def refusal(self, row: PlannedRow) -> RowError | None:
        """Why a row cannot be run, though it could when it was planned."""
        ...

    def checked(self, row: PlannedRow, completion: Completion) -> Completion:
        """The completion, with an error when it is not what the row asks for."""
        ...

    def fold(self, finished: Sequence[tuple[PlannedRow, tuple[Completion, ...]]]) -> pa.Table:
        """The result rows of finished rows and their duplicates, out of the completions of all their requests."""
        ...


def make_task(job: Job, tokenizer: "Tokenizer", spec: "ModelSpec", *, shares_prefixes: bool) -> Task:
    """The job's."""
    max_model_len = min(job.max_model_len or spec.max_model_len, spec.max_model_len)
    match job.task:
        case "generate":
            return GenerateTask(
                job,
                tokenizer,
                Grammars(tokenizer, spec),
                max_model_len,
                shares_prefixes=shares_prefixes,
                num_eos_tokens=len(spec.eos_token_ids),
            )
        case "score":
            return ScoreTask(job, max_model_len, shares_prefixes=shares_prefixes)
        case "choose":
            return ChooseTask(job, shares_prefixes=shares_prefixes)
        case "embed":
            return EmbedTask(job, spec.hidden_size, shares_prefixes=shares_prefixes)


def cached_tokens(job: Job, shared_len: int, prompt_tokens: int) -> int:
    """What the column of that name says of a row that shares `shared_len` tokens with the one before it in plan order,
    where prefixes are shared."""
    match job.task:
        case "score":
            return score.cached_len(shared_len, prompt_tokens)
        case "embed":
            return embed.cached_len(shared_len, job.pooling)
    return shared_len


def result_schema(job: Job, spec: "ModelSpec") -> pa.Schema:
    """The columns that the job's task adds to the input's, known before anything runs."""
    match job.task:
        case "generate":
            columns = generate.columns(job)
        case "score":
            columns = score.COLUMNS
        case "choose":
            columns = choose.columns(job)
        case "embed":
            columns = embed.columns(spec.hidden_size)
    return pa.schema([field.with_name(job.output_prefix + field.name) for field in columns])

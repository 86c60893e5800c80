"""A job whose inputs, model and folder were found, before anything is loaded, planned or written.

Importing it must stay quick: a complete job that is submitted again needs no more.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from batchrun.checkpoint import Checkpoint, cache_folder, load_tokenizer, resolve
from batchrun.errors import DataError, ModelUnavailable, UsageError
from batchrun.job import Job
from batchrun.latency import Latencies
from batchrun.outcome import Outcome
from batchrun.plan.plan import load_plan
from batchrun.plan.sharing import decide
from batchrun.plan.source import InputFiles, expand, fingerprint, require_column, scan
from batchrun.store.at_hand import as_called
from batchrun.store.result_files import check_partitions
from batchrun.store.reused import read_reused
from batchrun.store.samples import published
from batchrun.store.store import Store
from batchrun.tasks.task import result_schema
from batchrun.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class OpenedJob:
    """A job whose inputs and model were found and whose folder is open; nothing is loaded yet."""

    job: Job
    files: InputFiles
    checkpoint: Checkpoint
    store: Store

    @property
    def identity(self) -> dict[str, str]:
        return self.job.fingerprint(inputs=fingerprint(self.files), model_digest=self.checkpoint.spec.digest)

    @property
    def is_answered(self) -> bool:
        """Whether OUT has this job's answers. Raises JobMismatch where it has another's that may not be replaced."""
        return self.store.is_complete and not self.store.holds_other(self.identity)

    def claim(self) -> None:
        """Makes the folder this job's, inside the store's lock. Raises JobMismatch."""
        self.store.check(self.job.model_dump(mode="json"), self.identity)

    @property
    def kept(self) -> pa.Schema:
        """The input's columns that the result keeps."""
        schema, names = self.files.schema, self.job.keep_cols
        if names is None:
            return schema
        return pa.schema([require_column(schema, name, "--keep-cols") for name in names])

    @property
    def results(self) -> pa.Schema:
        """The columns that are added to them, as parts have them."""
        return result_schema(self.job, self.checkpoint.spec)

    def check_model(self) -> None:
        """Raises UsageError or ModelUnavailable where options and the model's configuration tell that it will not load.

        What only the weights or the device tell is found when it is loaded.
        """
        job, spec, folder = self.job, self.checkpoint.spec, self.checkpoint.folder
        if job.deterministic and spec.has_states:
            raise ModelUnavailable(f"{spec.name} keeps states, for which --deterministic is not proven; leave it out")
        if job.disaggregate and spec.has_states:
            raise UsageError(f"{spec.name} keeps states, which --disaggregate cannot hand over; leave it out")
        if job.tensor_parallel == 1:
            return
        if folder is None:
            raise UsageError(f"-m {spec.name} has no weights to divide; leave out --tensor-parallel")
        # Imported here: it imports transformers.
        from batchrun.divisible import require_divisible

        require_divisible(folder, job.tensor_parallel, trust_remote_code=job.trust_remote_code)

    def check_partitions(self) -> None:
        """Raises DataError when the values of --partition-by cannot be folders; reads that column once."""
        name = self.job.partition_by
        if name is None:
            return
        require_column(self.kept, name, "--partition-by")
        values = pa.nulls(0, self.kept.field(name).type)
        for batch in scan(self.files, [name], self.job.limit):
            values = pa.concat_arrays([values, batch.column(1)]).unique()
            check_partitions(values, name)

    def load_tokenizer(self) -> Tokenizer:
        return tokenizer_of(self.job, self.checkpoint)


def open_job(job: Job) -> OpenedJob:
    """Everything that can be refused without loading or writing anything. Raises BatchrunError."""
    files = expand(job.inputs)
    store = Store.open(job.output, overwrite=job.overwrite)
    opened = OpenedJob(job, files, find_model(job), store)
    taken = sorted({*opened.kept.names} & {*published(opened.results, job.n).names})
    if taken:
        raise DataError(
            f"the input has a column {taken[0]!r} and so has the result; give --output-prefix out_, "
            "or leave the column out with --keep-cols"
        )
    return opened


def stored_job(output: Path | str) -> Job:
    """The job that is stored beside `output`, a path or URL. Raises InputMissing when there is none."""
    store = Store.open(output)
    with as_called(store):
        store.at.require_job()
    return Job.model_validate(dict(store.job) | {"output": str(output), "overwrite": False})


def find_model(job: Job) -> Checkpoint:
    """The job's model. Raises ModelUnavailable."""
    return resolve(job.model, revision=job.revision, cache=cache_folder(), trust_remote_code=job.trust_remote_code)


def tokenizer_of(job: Job, checkpoint: Checkpoint) -> Tokenizer:
    """What the job's texts are cut with. Raises ModelUnavailable, UsageError."""
    return load_tokenizer(
        checkpoint,
        tokenizer=job.tokenizer,
        chat_template=job.chat_template,
        trust_remote_code=job.trust_remote_code,
    )


def as_found(opened: OpenedJob) -> Outcome:
    """The job's outcome as its folder has it, where this process has done nothing for it. Raises StorageFailed."""
    began, store = time.monotonic(), opened.store
    plan, done, reused = load_plan(store.at.plan), store.counts(), read_reused(store.at)
    return Outcome(
        output=store.output,
        rows=done.rows,
        errors=done.errors,
        error_examples=plan.summary.error_examples if plan else {},
        duplicates=plan.summary.num_duplicates if plan else 0,
        reused=reused.rows if reused else 0,
        vanished=reused.vanished if reused else 0,
        elapsed_s=time.monotonic() - began,
        latencies=Latencies.from_dict(store.read_progress().get("latencies", {})),
        already_complete=True,
        shares_prefixes=plan is None or decide(opened.job.prefix_caching, plan.summary).is_on,
        max_error_rate=opened.job.max_error_rate,
    )

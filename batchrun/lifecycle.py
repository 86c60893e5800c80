"""A job from its options to its result: open the folder, plan, run what is pending, publish.

Every stage reads only what the one before wrote, so any of them can be killed and started again. The same call
goes on where the last one stopped, and returns at once when the job is complete.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import pyarrow as pa

from batchrun import __version__
from batchrun.checkpoint import Checkpoint, cache_folder, load_tokenizer, resolve
from batchrun.engine.statistics import Counters
from batchrun.errors import DataError, EngineFailed, StorageFailed
from batchrun.executors import local
from batchrun.job import Job
from batchrun.latency import Latencies
from batchrun.observe.events import Event, Finished, Message, Observe, RunProgress
from batchrun.outcome import Outcome
from batchrun.plan.plan import Plan, load_plan, make_plan
from batchrun.plan.sharing import decide
from batchrun.plan.source import InputFiles, expand, fingerprint, require_column, scan
from batchrun.recall import Recall
from batchrun.report.recorder import recording
from batchrun.report.report import write_report
from batchrun.reuse import copied, copy_answers, earlier_job, foresee
from batchrun.stop import StopRequest
from batchrun.store.durable import storage_errors, write_file
from batchrun.store.publish import publish
from batchrun.store.result_files import Shape, check_partitions
from batchrun.store.store import Store
from batchrun.tasks.generate import result_schema
from batchrun.tokenizer import Tokenizer
from batchrun.tune import simulation
from batchrun.tune import tune as tuning
from batchrun.tune.choice import Weights
from batchrun.tune.profile import as_tuned, find

_log = logging.getLogger(__name__)

_PROGRESS_FILE_EVERY_S = 2.0


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
    def kept(self) -> pa.Schema:
        """The input's columns that the result keeps."""
        schema, names = self.files.schema, self.job.keep_cols
        if names is None:
            return schema
        return pa.schema([require_column(schema, name, "--keep-cols") for name in names])

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
        job = self.job
        return load_tokenizer(
            self.checkpoint,
            tokenizer=job.tokenizer,
            chat_template=job.chat_template,
            trust_remote_code=job.trust_remote_code,
        )


def plan(job: Job, observe: Observe) -> Plan:
    """Plans the job, or finds the plan that it has; loads no weights.

    Raises:
        BatchrunError: whatever is wrong with inputs, columns, model or output, before anything has run.
    """
    opened = open_job(job)
    opened.check_partitions()
    earlier = earlier_job(job, opened.store, opened.identity)
    with opened.store.lock(job.wait_lock):
        tokenizer = cache(opened.load_tokenizer)
        _take_folder(opened, tokenizer, observe)
        made = _planned(opened, tokenizer, observe)
    if earlier is not None:
        num_reused = foresee(earlier, job, made)
        observe(Message("info", f"{num_reused:,} of {made.summary.num_rows:,} rows are answered by {earlier.at.out}"))
    return made


def estimate(job: Job, plan: Plan) -> simulation.Estimate | None:
    """What the plan will take to run, by what `tune` measured; None where it has not measured this model here.

    Kept beside the plan, for the report to hold against what came. Raises StorageFailed when it cannot be.
    """
    spec = _resolve(job).spec
    profile = find(cache_folder(), job, spec)
    if profile is None:
        return None
    estimated = simulation.estimate(job, plan, profile)
    with storage_errors(plan.folder):
        write_file(plan.folder / "estimate.json", json.dumps(asdict(estimated)).encode(), plan.folder)
    return estimated


def tune(job: Job, weights: Weights, is_quick: bool, observe: Observe) -> tuning.Tuned:
    """Measures the job's model on this machine, for the plans and runs to come.

    Raises:
        BatchrunError: the model or device is not there, or the cache cannot be written to.
    """
    return tuning.tune(job, _resolve(job), weights, cache_folder(), is_quick=is_quick, observe=observe)


def submit(job: Job, observe: Observe, stop: StopRequest) -> Outcome:
    """Brings the job to its end from wherever it is.

    Raises:
        StoppedEarly, Interrupted: `stop` was raised, by a signal, the deadline or `batchrun cancel`, or another process
            holds the job; what was done is saved.
        BatchrunError: the job is wrong, or a disk or the engine failed; what was committed stays.
    """
    began = time.monotonic()
    opened = open_job(job)
    store = opened.store
    if not store.is_complete or job.overwrite:
        opened.check_partitions()
    earlier = earlier_job(job, store, opened.identity)
    observe = Recall(job, store.at, stop).heeded_by(observe)
    with store.lock(job.wait_lock):
        tokenizer = cache(opened.load_tokenizer)
        _take_folder(opened, tokenizer, observe)
        if store.is_complete:
            return _outcome(opened, load_plan(store.at.plan), None, began)
        plan = _planned(opened, tokenizer, observe)
        if earlier is not None:
            shares_prefixes = decide(job.prefix_caching, plan.summary).is_on
            copy_answers(earlier, job, plan, store, observe, shares_prefixes=shares_prefixes)
        ran = local.Ran(is_complete=True, counters=Counters(), seconds=0.0)
        if store.num_done() < plan.summary.num_rows:
            try:
                with _recording(store, observe) as told, recording(store, told) as recorded:
                    tuned = _tuned(opened, observe)
                    ran = local.run(tuned, plan, opened.checkpoint, tokenizer(), store, recorded, stop)
            except (DataError, EngineFailed):
                _report(store, observe)
                raise
            if not ran.is_complete:
                _report(store, observe)
                observe(_finished("stopped", store, plan, ran, began))
                raise stop.error(_saved(store, plan))
        rows = scan(opened.files, opened.kept.names, job.limit)
        shape = Shape(job.partition_by, job.file_size)
        publish(store, rows, opened.kept, result_schema(job), _footer(opened), shape)
        observe(_finished("completed", store, plan, ran, began))
        _report(store, observe)
        return _outcome(opened, plan, ran, began)


def resume(output: Path, observe: Observe, stop: StopRequest) -> Outcome:
    """Brings the job that is stored beside `output` to its end.

    Raises:
        BatchrunError: as `submit`, or there is no such job.
    """
    return submit(stored_job(output), observe, stop)


def stored_job(output: Path) -> Job:
    """The job that is stored beside `output`. Raises InputMissing when there is none."""
    store = Store.open(output)
    store.at.require_job()
    return Job.model_validate(dict(store.job) | {"output": str(output), "overwrite": False})


def open_job(job: Job) -> OpenedJob:
    """Everything that can be refused without loading or writing anything. Raises BatchrunError."""
    files = expand(job.inputs)
    store = Store.open(Path(job.output), overwrite=job.overwrite)
    opened = OpenedJob(job, files, _resolve(job), store)
    taken = sorted({*opened.kept.names} & {*result_schema(job).names})
    if taken:
        raise DataError(
            f"the input has a column {taken[0]!r} and so has the result; give --output-prefix out_, "
            "or leave the column out with --keep-cols"
        )
    return opened


def _resolve(job: Job) -> Checkpoint:
    return resolve(job.model, revision=job.revision, cache=cache_folder(), trust_remote_code=job.trust_remote_code)


def _tuned(opened: OpenedJob, observe: Observe) -> Job:
    """The job, with steps as large as `tune` found best where it leaves them open; says so."""
    job = opened.job
    profile = find(cache_folder(), job, opened.checkpoint.spec)
    tuned = as_tuned(job, profile)
    if profile is not None and tuned is not job:
        observe(
            Message(
                "info",
                f"steps of at most {tuned.max_num_batched_tokens:,} tokens and {tuned.max_num_seqs:,} rows, as tuned "
                f"{profile.label}; --max-num-batched-tokens or --max-num-seqs override it",
            )
        )
    return tuned


def _take_folder(opened: OpenedJob, tokenizer: Callable[[], Tokenizer], observe: Observe) -> None:
    """Makes the folder this job's.

    Another job that was there goes only once this one's plan is made, so that one that cannot be planned costs nothing.
    """
    store, options, identity = opened.store, opened.job.model_dump(mode="json"), opened.identity
    if not store.holds_other(identity):
        store.check(options, identity)
        return
    staged = store.at.tmp / store.at.plan.name
    _make_plan(opened, staged, tokenizer, observe)
    store.check(options, identity)
    store.adopt_plan(staged)


def _planned(opened: OpenedJob, tokenizer: Callable[[], Tokenizer], observe: Observe) -> Plan:
    return load_plan(opened.store.at.plan) or _make_plan(opened, opened.store.at.plan, tokenizer, observe)


def _make_plan(opened: OpenedJob, folder: Path, tokenizer: Callable[[], Tokenizer], observe: Observe) -> Plan:
    return make_plan(opened.job, opened.files, tokenizer(), opened.checkpoint.spec, folder, observe)


@contextmanager
def _recording(store: Store, observe: Observe) -> Iterator[Observe]:
    """`observe`, and what `status` shows of this process; in the end how it ended.

    Latencies are those of all processes that have worked on the job, as far as these could say so.
    """
    before = Latencies.from_dict(store.read_progress().get("latencies", {}))
    latest: dict[str, object] = {"status": "in_progress", "latencies": before.to_dict()}
    written_at = float("-inf")

    def record(event: Event) -> None:
        nonlocal written_at
        observe(event)
        if isinstance(event, RunProgress):
            latest.update(_said(event) | {"latencies": (before + event.latencies).to_dict()})
            if time.monotonic() - written_at >= _PROGRESS_FILE_EVERY_S:
                store.write_progress(latest)
                written_at = time.monotonic()

    store.write_progress(latest)
    ending = "failed"
    try:
        yield record
        ending = "finalizing" if latest.get("rows_done") == latest.get("rows_total") else "cancelled"
    except KeyboardInterrupt:
        ending = "cancelled"
        raise
    finally:
        try:
            store.write_progress(latest | {"status": ending})
        except StorageFailed:
            # The disk is what failed the job, most likely; its own error is on the way already.
            if ending != "failed":
                raise


def _report(store: Store, observe: Observe) -> None:
    """Writes the report and says which of its rules ask for attention; a job does not fail for want of it."""
    try:
        report = write_report(store.at.out)
    except Exception as error:
        # Whatever is wrong with a page about the answers, they are there.
        _log.debug("no report", exc_info=True)
        observe(Message("warning", f"no report: {type(error).__name__}: {error}"))
        return
    for verdict in report.facts.fired:
        level: Literal["warning", "info"] = "warning" if verdict.state == "alert" else "info"
        observe(Message(level, f"{verdict.state}: {verdict.rule}: {verdict.measured}; {verdict.advice}"))
    observe(Message("info", f"report: {report.page}"))


def _said(event: RunProgress) -> dict[str, object]:
    """What `status` shows of a run: its figures, in one object."""
    counters, statistics = event.statistics.counters, event.statistics
    return {
        "rows_done": event.rows_done,
        "rows_total": event.rows_total,
        "rows_failed": event.rows_failed,
        "tokens_done": event.tokens_done,
        "tokens_total": event.tokens_total,
        "hit_rate": counters.hit_rate,
        "kv_usage": statistics.kv_usage,
        "preemptions": counters.preemptions,
        "num_running": statistics.num_running,
        "elapsed_s": event.elapsed_s,
        "output_tokens": counters.output_tokens,
    }


def _saved(store: Store, plan: Plan) -> str:
    """What a stopped job keeps, in a few words."""
    committed = f"{store.num_done():,} of {plan.summary.num_rows:,} rows are committed"
    unfinished = store.num_unfinished()
    if not unfinished:
        return committed
    return f"{committed}, the tokens of {unfinished:,} unfinished {'row' if unfinished == 1 else 'rows'} are saved"


def _footer(opened: OpenedJob) -> dict[str, str]:
    return {"batchrun.version": __version__, "batchrun.model": opened.checkpoint.spec.name}


def _finished(how: Literal["completed", "stopped"], store: Store, plan: Plan, ran: local.Ran, began: float) -> Finished:
    done = store.counts()
    return Finished(
        how=how,
        rows_done=done.rows,
        rows_total=plan.summary.num_rows,
        rows_failed=done.failed,
        output_tokens=ran.counters.output_tokens,
        elapsed_s=time.monotonic() - began,
    )


def _outcome(opened: OpenedJob, plan: Plan | None, ran: local.Ran | None, began: float) -> Outcome:
    done = opened.store.counts()
    reused = copied(opened.store)
    counters = ran.counters if ran else Counters()
    return Outcome(
        output=opened.store.at.out,
        rows=done.rows,
        errors=done.errors,
        error_examples=plan.summary.error_examples if plan else {},
        duplicates=plan.summary.num_duplicates if plan else 0,
        reused=reused.rows if reused else 0,
        vanished=reused.vanished if reused else 0,
        prompt_tokens=counters.prompt_tokens,
        computed_tokens=counters.computed_prompt_tokens,
        cached_tokens=counters.cached_tokens,
        output_tokens=counters.output_tokens,
        preemptions=counters.preemptions,
        swapped_bytes=counters.swapped_bytes,
        recomputed_tokens=counters.recomputed_tokens,
        drafted_tokens=counters.drafted_tokens,
        accepted_tokens=counters.accepted_tokens,
        steps=counters.steps,
        occupancy=counters.occupancy,
        run_s=ran.seconds if ran else 0.0,
        checkpoint_s=ran.checkpoint_s if ran else 0.0,
        elapsed_s=time.monotonic() - began,
        latencies=Latencies.from_dict(opened.store.read_progress().get("latencies", {})),
        already_complete=ran is None,
        shares_prefixes=plan is None or decide(opened.job.prefix_caching, plan.summary).is_on,
        max_error_rate=opened.job.max_error_rate,
    )

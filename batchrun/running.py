"""An open job from its plan to its result: what is pending runs, and when nothing is, it is published."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import PurePath
from typing import Any, Literal

from batchrun import __version__
from batchrun.checkpoint import cache_folder
from batchrun.engine.statistics import Counters
from batchrun.errors import BatchrunError
from batchrun.executors import fleets, local
from batchrun.job import Job
from batchrun.observe.events import Finished, Message, Observe
from batchrun.opened import OpenedJob, as_found
from batchrun.outcome import Outcome
from batchrun.plan.plan import Plan
from batchrun.plan.sharing import decide
from batchrun.plan.source import scan
from batchrun.planning import planned, take_folder
from batchrun.progress_file import showing
from batchrun.recall import Recall, giving_way
from batchrun.report.recorder import recording
from batchrun.report.sending import sending
from batchrun.report.tracking import require, track
from batchrun.reuse import copy_answers, earlier_job
from batchrun.stop import StopRequest
from batchrun.store.publish import publish
from batchrun.store.result_files import Shape
from batchrun.store.store import Store
from batchrun.tokenizer import Tokenizer
from batchrun.tune.profile import as_tuned, find

_log = logging.getLogger(__name__)


def run(opened: OpenedJob, observe: Observe, stop: StopRequest) -> Outcome:
    """Plans the job where it has no plan, runs what is pending and publishes.

    Raises:
        StoppedEarly, StoppedByUser: `stop` was raised, by a signal, the deadline or `batchrun cancel`, or another
            process holds the job; what was done is saved.
        BatchrunError: the job is wrong, or a disk or the engine failed; what was committed stays.
    """
    began = time.monotonic()
    job, store = opened.job, opened.store
    fleets.check_installed(job)
    if job.track is not None:
        require(job.track)
    opened.check_model()
    opened.check_partitions()
    earlier = earlier_job(job, store, opened.identity, opened.results)
    observe = Recall(job, store.at, stop).heeded_by(giving_way(observe, stop))
    with store.lock(job.wait_lock):
        tokenizer = cache(opened.load_tokenizer)
        take_folder(opened, tokenizer, observe)
        if store.is_complete:
            return as_found(opened)
        plan = planned(opened, tokenizer, observe)
        store.share()
        if earlier is not None:
            shares_prefixes = decide(job.prefix_caching, plan.summary).is_on
            copy_answers(earlier, job, plan, store, observe, shares_prefixes=shares_prefixes)
        ran = local.Ran(is_complete=True, counters=Counters(), seconds=0.0)
        if store.num_done() < plan.summary.num_rows:
            try:
                with (
                    showing(store, observe) as told,
                    sending(job.push_gateway, str(store.output), told) as send,
                    recording(store, told, send) as recorded,
                ):
                    ran = _execute(opened, plan, tokenizer, recorded, stop)
            except BatchrunError:
                _report(store, observe)
                raise
            if not ran.is_complete:
                _report(store, observe)
                observe(_finished("cancelled", store, plan, ran, began))
                raise stop.error(_saved(store, plan))
        rows = scan(opened.files, opened.kept.names, job.limit)
        shape = Shape(job.partition_by, job.file_size, job.order)
        publish(store, rows, opened.kept, opened.results, _footer(opened), shape, job.n)
        observe(_finished("completed", store, plan, ran, began))
        _report(store, observe)
        outcome = replace(
            as_found(opened),
            **_figures(ran.counters),
            run_s=ran.seconds,
            checkpoint_s=ran.checkpoint_s,
            recording_s=ran.recording_s,
            elapsed_s=time.monotonic() - began,
            already_complete=False,
        )
        if job.track is not None:
            options = job.model_dump(mode="json", exclude_defaults=True)
            track(job.track, PurePath(str(store.output)).name, options, outcome.as_dict(), store.at.folder, observe)
        return outcome


def _execute(
    opened: OpenedJob, plan: Plan, tokenizer: Callable[[], Tokenizer], observe: Observe, stop: StopRequest
) -> local.Ran:
    """Runs what is pending, here or elsewhere."""
    job, checkpoint, store = opened.job, opened.checkpoint, opened.store
    if fleets.has_fleet(job):
        return fleets.run(job, plan, checkpoint.spec, store, observe, stop)
    return local.run(_tuned(opened, observe), plan, checkpoint, tokenizer(), store, observe, stop)


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


def _report(store: Store, observe: Observe) -> None:
    """Writes the report and says which of its rules ask for attention; a job does not fail for want of it."""
    # Imported here: its libraries take a while to load, and engines should not wait for them.
    from batchrun.report.report import write_report

    try:
        report = write_report(store.at.out, str(store.output))
    except Exception as error:
        # Whatever is wrong with a page about the answers, they are there.
        _log.debug("no report", exc_info=True)
        observe(Message("warning", f"no report: {type(error).__name__}: {error}"))
        return
    for verdict in report.facts.fired:
        level: Literal["warning", "info"] = "warning" if verdict.state == "alert" else "info"
        observe(Message(level, f"{verdict.state}: {verdict.rule}: {verdict.measured}; {verdict.advice}"))
    observe(Message("info", f"report: {store.called(str(report.page))}"))


def _saved(store: Store, plan: Plan) -> str:
    """What a stopped job keeps, in a few words."""
    committed = f"{store.num_done():,} of {plan.summary.num_rows:,} rows are committed"
    unfinished = store.num_unfinished()
    if not unfinished:
        return committed
    return f"{committed}, the tokens of {unfinished:,} unfinished {'row' if unfinished == 1 else 'rows'} are saved"


def _footer(opened: OpenedJob) -> dict[str, str]:
    return {"batchrun.version": __version__, "batchrun.model": opened.checkpoint.spec.name}


def _finished(
    how: Literal["completed", "cancelled"], store: Store, plan: Plan, ran: local.Ran, began: float
) -> Finished:
    done = store.counts()
    return Finished(
        how=how,
        rows_done=done.rows,
        rows_total=plan.summary.num_rows,
        rows_failed=done.failed,
        output_tokens=ran.counters.output_tokens,
        elapsed_s=time.monotonic() - began,
    )


def _figures(counters: Counters) -> dict[str, Any]:
    """What an outcome says of the engine's work."""
    return {
        "prompt_tokens": counters.prompt_tokens,
        "computed_tokens": counters.computed_prompt_tokens,
        "cached_tokens": counters.cached_tokens,
        "output_tokens": counters.output_tokens,
        "preemptions": counters.preemptions,
        "swapped_bytes": counters.swapped_bytes,
        "recomputed_tokens": counters.recomputed_tokens,
        "drafted_tokens": counters.drafted_tokens,
        "accepted_tokens": counters.accepted_tokens,
        "steps": counters.steps,
        "occupancy": counters.occupancy,
    }

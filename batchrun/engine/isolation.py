"""Which rows cannot be computed: those of a failed step by halves, and halves of these, until a row fails alone.

Each half is computed from its rows' first tokens on, by a scheduler of its own: after a failure nothing that the device
holds is relied on.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

from batchrun.engine.scheduler import Scheduler, SchedulerConfig
from batchrun.engine.sequence import Sequence
from batchrun.engine.step import Runner
from batchrun.errors import BatchrunError


@dataclass(frozen=True, slots=True)
class Culprit:
    """A row that fails by itself, and how."""

    sequence: Sequence
    error: Exception


def find_culprits(config: SchedulerConfig, runner: Runner, rows: Rows[Sequence]) -> list[Culprit]:
    """Those of the rows that the runner raises for when it computes them alone, up to their next token.

    Rows are not changed; all that the runner holds of any row is lost.

    Raises:
        BatchrunError: what the runner says is nobody's fault.
    """
    error = _failure(config, runner, rows)
    if error is None:
        return []
    if len(rows) == 1:
        return [Culprit(rows[0], error)]
    half = len(rows) // 2
    return [*find_culprits(config, runner, rows[:half]), *find_culprits(config, runner, rows[half:])]


def _failure(config: SchedulerConfig, runner: Runner, rows: Rows[Sequence]) -> Exception | None:
    """What the runner raises when it computes these rows and no others."""
    scheduler = Scheduler(replace(config, num_host_slots=0, num_free_tokens=0))
    for row in rows:
        request, output_ids = row.request, tuple(row.output_ids.tolist())
        sampling = replace(request.sampling, max_tokens=len(output_ids) + 1)  # what is read has no output
        scheduler.add(replace(request, sampling=sampling, output_ids=output_ids, beams=None))
    while scheduler.has_work:
        batch = scheduler.schedule()
        try:
            sampled = runner.launch(batch).wait()
        except BatchrunError:
            raise
        except Exception as error:
            return error
        scheduler.update(batch, sampled, _never_stop)
    return None


def _never_stop(sequence: Sequence) -> None:
    """No text is looked for."""

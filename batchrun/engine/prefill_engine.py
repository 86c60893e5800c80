"""The engine that computes prompts for another one: its own scheduler, pool and prefix tree, and no answers.

A row is in it until its tokens are computed; then its blocks are copied to host slots that the other engine has
chosen, and free again. After a failure all rows are left to the other engine, which finds out which one is at fault.
"""

import time
from dataclasses import replace

from batchrun.engine.handover import Key, Prefill, Prefilled, uncounted
from batchrun.engine.scheduler import Scheduler, SchedulerConfig
from batchrun.engine.sequence import Sequence
from batchrun.engine.step import Runner, ScheduledBatch
from batchrun.errors import BatchrunError, EngineFailed

_MOST_FAILURES = 3  # one after another, and it is no row's fault


class PrefillEngine:
    """`config` is that of the engine that decodes, but for the size of the pool; all host slots are that one's."""

    def __init__(self, config: SchedulerConfig, runner: Runner) -> None:
        self.scheduler = Scheduler(replace(config, num_host_slots=0, num_free_tokens=0))
        self._runner = runner
        self._host_slots: dict[Key, tuple[int, ...]] = {}
        self._num_failures = 0
        self._busy_before = time.process_time()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def capacity(self) -> int:
        """Tokens that the KV pool can hold."""
        return self.scheduler.capacity

    def add(self, prefill: Prefill) -> None:
        self._host_slots[prefill.request.key] = prefill.host_slots
        self.scheduler.add(prefill.request)

    def step(self) -> Prefilled:
        """Computes a step, and hands over the rows that are computed by it.

        Raises:
            BatchrunError: it cannot go on, and no row is at fault.
        """
        try:
            filled, failed = self._advance()
            self._num_failures = 0
        except BatchrunError:
            raise
        except Exception as error:
            self._num_failures += 1
            if self._num_failures == _MOST_FAILURES:
                raise EngineFailed(f"steps fail one after another: {type(error).__name__}: {error}") from error
            filled, failed = (), self._give_back()
        for key in (*filled, *failed):
            del self._host_slots[key]
        busy_s = time.process_time() - self._busy_before
        return Prefilled(filled, failed, uncounted(self.scheduler.counters), busy_s)

    def _advance(self) -> tuple[tuple[Key, ...], tuple[Key, ...]]:
        """The rows that are handed over, and those whose logits are not finite."""
        batch = self.scheduler.schedule()
        sampled = self._runner.launch(batch).wait()
        failed = self.scheduler.update(batch, sampled, _never_stop)
        computed = [item.sequence for item in batch.items if item.samples and not item.sequence.is_finished]
        if computed:
            outs = tuple(self.scheduler.hand_over(one, self._host_slots[one.request.key]) for one in computed)
            self._runner.launch(ScheduledBatch((), outs)).wait()
            self._runner.wait_for_copies()
        return tuple(one.request.key for one in computed), tuple(completion.key for completion in failed)

    def _give_back(self) -> tuple[Key, ...]:
        """Forgets every row, and all that was computed."""
        for sequence in self.scheduler.start_over():
            self.scheduler.drop(sequence)
        self.scheduler.admission.close()
        return tuple(self._host_slots)

    def check(self) -> None:
        """States every invariant between two steps; for tests."""
        self.scheduler.check()


def _never_stop(sequence: Sequence) -> None:
    """No text is looked for."""

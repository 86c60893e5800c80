"""A task of Airflow that brings a job to its end, in a process of its own. Airflow 2.10 and newer, and 3.

The job goes on where a try before it was stopped, because its command is the same. Imports neither batchrun nor torch.
"""

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from batchrun_jobs.submission import IN_VAIN, Submission, submit_command

try:
    from airflow.sdk import BaseOperator
except ImportError:  # Airflow 2
    from airflow.models import BaseOperator
try:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException
except ImportError:  # before Airflow 3.2
    from airflow.exceptions import AirflowException, AirflowFailException, AirflowSkipException

_OWN = {"inputs", "output", "config", "json", "drain_timeout", "wait_lock"}


class BatchrunOperator(BaseOperator):  # type: ignore[misc]
    """Runs `batchrun submit`; the task's XCom is the summary that it prints with `--json`.

    Exit codes of `fail_on` fail the task without a retry, those of `skip_on` skip it, and any other than 0 fails this
    try: the next one waits up to `wait_lock` seconds for a process of the one before that still drains, and goes on
    from what it saved. When the task is killed or runs into its `execution_timeout`, the process drains for up to
    `drain_timeout` seconds and saves, and a try that ran into its timeout ends only then.
    """

    template_fields: Sequence[str] = ("inputs", "out", "options", "config", "env", "python")

    def __init__(
        self,
        *,
        out: str,
        inputs: str | Sequence[str] = (),
        options: Mapping[str, object] | None = None,
        config: str | None = None,
        drain_timeout: float = 45.0,
        wait_lock: float = 120.0,
        fail_on: Collection[int] = IN_VAIN,
        skip_on: Collection[int] = (),
        env: Mapping[str, str] | None = None,
        python: str | None = None,
        **kwargs: Any,
    ) -> None:
        """`out` is where the result goes, the command's -o, and `options` are the command's, by name; `config` is a
        TOML file with more of them, `env` variables on top of the worker's. `python` is the interpreter that has
        batchrun, by default Airflow's own.
        """
        super().__init__(**kwargs)
        self.inputs = inputs
        self.out = out
        self.options = options
        self.config = config
        self.drain_timeout = drain_timeout
        self.wait_lock = wait_lock
        self.fail_on = fail_on
        self.skip_on = skip_on
        self.env = env
        self.python = python
        self._submission: Submission | None = None

    def execute(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """The job's summary.

        Raises:
            AirflowFailException, AirflowSkipException, AirflowException: the exit code says so.
        """
        command = self._command()
        self.log.info("running %s", command)
        self._submission = Submission(command, self.log.info, {**os.environ, **(self.env or {})})
        try:
            exit_code = self._submission.wait()
        finally:
            self.on_kill()
        if exit_code in self.skip_on:
            raise AirflowSkipException(self._ending)
        if exit_code in self.fail_on:
            raise AirflowFailException(self._ending)
        if exit_code != 0:
            raise AirflowException(self._ending)
        return self._submission.summary()

    def on_kill(self) -> None:
        """Returns when the process has drained and gone."""
        if self._submission is not None:
            self._submission.stop(self.drain_timeout)

    @property
    def _ending(self) -> str:
        assert self._submission is not None
        return f"batchrun exited {self._submission.exit_code}; {self._submission.error}"

    def _command(self) -> list[str]:
        options = self.options or {}
        own = sorted(name for name in options if name.replace("-", "_") in _OWN)
        if own:
            raise AirflowFailException(f"options: {', '.join(own)} is set by the operator; give its own argument")
        inputs = [self.inputs] if isinstance(self.inputs, str) else self.inputs
        return submit_command(
            self.python or sys.executable,
            inputs,
            self.out,
            config=self.config,
            drain_timeout=f"{self.drain_timeout}s",
            wait_lock=f"{self.wait_lock}s",
            **options,
        )

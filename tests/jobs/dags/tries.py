"""Tasks that end in every way: complete, refused, skipped, timed out in mid-job, held by another process."""

import os
from datetime import datetime, timedelta

from airflow import DAG

from batchrun_jobs.airflow import BatchrunOperator

FOLDER, PYTHON = os.environ["TRIES_FOLDER"], os.environ["TRIES_PYTHON"]
SLOW = {"model": "echo", "min_tokens": 100, "max_tokens": 200, "checkpoint_every": "1s"}


def task(name: str, **given: object) -> None:
    usual = {"inputs": f"{FOLDER}/input.parquet", "out": f"{FOLDER}/{{{{ ti.task_id }}}}", "python": PYTHON}
    BatchrunOperator(task_id=name, retries=20, retry_delay=timedelta(seconds=1), **usual | given)


with DAG("tries", schedule=None, start_date=datetime(2026, 1, 1), catchup=False) as dag:
    task("complete", options={"model": "echo", "limit": 63, "max_error_rate": "{{ 10 }}%"})
    task("bad_column", options={"model": "echo", "prompt_col": "promt"})
    task("nothing_new", inputs=f"{FOLDER}/none-*.parquet", options={"model": "echo"}, skip_on=(66,))
    task("own_option", options={"wait-lock": "1s"})
    # One row at a time takes longer than the timeout; the tries after it go on with many at a time.
    task(
        "timed_out",
        options=SLOW | {"max_num_seqs": "{{ 1 if ti.try_number == 1 else 128 }}"},
        execution_timeout=timedelta(seconds=20),
    )
    task("held", options={"model": "echo"}, wait_lock=0)
    task("waits", options={"model": "echo"})

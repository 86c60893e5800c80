"""Label and summarise the reviews that the evening's export left behind, every night at 02:30. For Airflow 3.

Copy it to your DAGs. `classify` is an operator of its own: it drains when it is killed, knows which failures a retry
cannot mend, and leaves its summary as XCom. `summarise` is the same by a BashOperator, which needs nothing but the
command. Both go on where the try before stopped, because the command is the same.
"""

import json
from datetime import datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

from batchrun_jobs.airflow import BatchrunOperator

with DAG(
    "nightly_reviews",
    schedule="30 2 * * *",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,
    # `python` has batchrun; it need not be Airflow's own.
    params={"folder": "/srv/reviews", "python": "/srv/venv/bin/python", "model": "HuggingFaceTB/SmolLM2-360M-Instruct"},
    default_args={"retries": 4, "retry_delay": timedelta(minutes=2), "execution_timeout": timedelta(hours=3)},
) as dag:
    classify = BatchrunOperator(
        task_id="classify",
        inputs="{{ params.folder }}/export.parquet",
        out="{{ params.folder }}/labels-{{ ds }}",
        # The deadline ends a try cleanly before Airflow does. An export without rows of its own is no failure.
        options={
            "preset": "classify",
            "prompt_col": "review",
            "model": "{{ params.model }}",
            "deadline": "2h50m",
            "max_error_rate": "5%",
        },
        skip_on=(66,),
        python="{{ params.python }}",
    )
    summarise = BashOperator(
        task_id="summarise",
        # --wait-lock: a try that was killed may still drain when the next one begins.
        bash_command=(
            "exec $PYTHON -m batchrun submit $FOLDER/labels-{{ ds }} --preset summarise --prompt-col review "
            "--keep-cols review,label --model $MODEL --deadline 2h50m --wait-lock 2m --json "
            "-o $FOLDER/summaries-{{ ds }}"
        ),
        env={"FOLDER": "{{ params.folder }}", "PYTHON": "{{ params.python }}", "MODEL": "{{ params.model }}"},
        append_env=True,
        output_processor=json.loads,
    )
    classify >> summarise

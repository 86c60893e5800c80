"""Jobs on a Ray cluster of which a node is removed and one is added: python -m tests.endurance.ray_cluster

Each job runs three times: on one local worker, on three actors undisturbed, and on three actors while the cluster
changes. It compares the results to the byte, looks that no row is in two parts, and prints how many prompt tokens were
found computed. The three nodes are processes of this machine, and share its cores.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
from ray.cluster_utils import Cluster

_NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}
_LEAST_HITS = 0.97
_MODELS = {
    "echo": ("-m", "echo", "--max-num-seqs", "2", "--max-tokens", "60"),
    "SmolLM2": ("--deterministic", "--ignore-eos", "--kv-cache-memory", "256MiB", "--max-tokens", "16"),
}


@click.command()
@click.option("--documents", default=24, help="Texts that questions are asked about.")
@click.option("--questions", default=16, help="Rows that share a text; eight times as many for echo.")
def main(documents: int, questions: int) -> None:
    os.environ |= {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    cluster = Cluster(initialize_head=True, head_node_args={**_NODE, "include_dashboard": False})
    nodes = [cluster.add_node(**_NODE) for _ in range(2)]

    def change() -> None:
        cluster.remove_node(nodes.pop())
        nodes.append(cluster.add_node(**_NODE))

    is_as_promised = True
    try:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "rows.parquet"
            fleet = ("--executor", "ray", "--workers", "3", "--ray-address", str(cluster.address))
            for name, model in _MODELS.items():
                pq.write_table(_rows(documents, questions * (8 if name == "echo" else 1)), source)
                options = (str(source), *model, "--checkpoint-every", "1s")
                alone = _run(Path(folder) / f"{name}-alone", options)
                calm = _run(Path(folder) / f"{name}-calm", (*options, *fleet))
                changed = _run(Path(folder) / f"{name}-changed", (*options, *fleet), change)
                for how, ran in (("1 worker", alone), ("3 actors", calm), ("3 actors, a node goes", changed)):
                    click.echo(_line(name, how, ran, alone))
                    is_as_promised &= ran["files"] == alone["files"] and _hits(ran) >= _LEAST_HITS * _hits(alone)
    finally:
        cluster.shutdown()
    sys.exit(0 if is_as_promised else 1)


def _rows(documents: int, questions: int) -> pa.Table:
    words = [f"Item {number} of the list is number {number * number % 97}." for number in range(30)]
    prompts = [
        f"Report {document}. {' '.join(words)}\nQuestion {question}: what is item {(document + question) % 30}?"
        for document in range(documents)
        for question in range(questions)
    ]
    return pa.table({"prompt": prompts})


def _run(out: Path, options: tuple[str, ...], disturb: Callable[[], None] | None = None) -> dict[str, Any]:
    """One job; `disturb` is called when a fifth of its rows are committed. Its outcome, and the bytes of its files."""
    command = [sys.executable, "-m", "batchrun", "submit", *options, "-o", str(out), "--json", "--progress", "none"]
    said, total = Path(f"{out}.stderr"), pq.read_metadata(options[0]).num_rows
    with said.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    while disturb is not None and process.poll() is None:
        if len(_committed(out)) >= total // 5:
            disturb()
            break
        time.sleep(0.1)
    stdout, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} exited {process.returncode}:\n{said.read_text()}")
    rows = _committed(out)
    if len(rows) != len({*rows}) or len(rows) != total:
        raise SystemExit(f"{len(rows)} rows in parts, {len({*rows})} different ones, of {total}")
    if disturb is not None and "is lost (" not in said.read_text():
        raise SystemExit("it was over before a node went: give more --documents")
    outcome: dict[str, Any] = json.loads(stdout)
    return outcome | {"files": {file.name: file.read_bytes() for file in sorted(out.iterdir())}}


def _committed(out: Path) -> list[int]:
    parts = sorted(Path(f"{out}.batchrun", "parts").glob("*.parquet"))
    return [row for part in parts for row in pq.read_table(part, columns=["row_idx"]).column(0).to_pylist()]


def _hits(ran: dict[str, Any]) -> float:
    """Share of the prompt tokens that were found computed."""
    return float(ran["cached_tokens"] / ran["prompt_tokens"])


def _line(name: str, how: str, ran: dict[str, Any], alone: dict[str, Any]) -> str:
    same = "the same bytes" if ran["files"] == alone["files"] else "OTHER BYTES"
    hits = f"{_hits(ran):.1%} of the prompt tokens hit, {_hits(ran) / _hits(alone):.1%} of one worker's rate"
    return f"{name:8} {how:22} {ran['rows']:,} rows, {same}; {hits}; {ran['run_s']:.0f} s"


if __name__ == "__main__":
    main()

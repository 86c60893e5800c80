"""The table's numbers, from runs whose times are given."""

import json
import re

from batchrun_jobs.bench.agreement import Agreement
from batchrun_jobs.bench.floor import Floor, Least, Rates
from batchrun_jobs.bench.measured import Measured
from batchrun_jobs.bench.table import as_json, floor_text, rows, text
from tests.bench.conftest import workload

WORK = workload([[1] * 30, [2] * 10], [4, 6])
FLOOR = Floor(Least(flops=30 * 10**9, num_bytes=10**9), (Rates(10e9, 2e9), Rates(15e9, 1e9, 20e9), Rates(30e9, 2e9)))


def run(
    run_s: float, ready_s: float = 2.0, computed: int | None = None, peak: int | None = None, others: float = 0.0
) -> Measured:
    return Measured(ready_s, run_s, ((0,) * 4, (0,) * 6), computed, None if computed is None else 0.75, peak, others)


RUNS = {
    "ours": [run(5.0, 1.0, 10, 3 << 20), run(4.0, 2.0, 10, 4 << 20), run(3.0, 3.0, 10, 4 << 20)],
    "theirs": [run(8.0), run(6.0, computed=40), run(7.0, others=0.3)],
}
AGREEMENTS = {"ours": Agreement(2, 0, ()), "theirs": Agreement(0, 1, ("theirs, row 1: ...",))}


def test_medians_spread_and_ratios() -> None:
    ours, theirs = rows(RUNS, AGREEMENTS, WORK, FLOOR.seconds)
    assert (ours.run_s, ours.fastest_s, ours.slowest_s, ours.ready_s) == (4.0, 3.0, 5.0, 2.0)
    assert (ours.rows_per_s, ours.output_tokens_per_s, ours.tokens_per_s) == (0.5, 2.5, 12.5)
    assert (ours.computed, ours.useful, ours.peak_rss_bytes) == (0.25, 0.75, 4 << 20)
    assert (ours.ratio, ours.over_floor) == (1.0, 2.0)
    assert (theirs.ratio, theirs.over_floor) == (1.75, 3.5)
    # One run has told and two have not.
    assert (theirs.computed, theirs.useful, theirs.peak_rss_bytes) == (None, None, None)


def test_the_table_is_a_line_a_way() -> None:
    header, ours, theirs = text(rows(RUNS, AGREEMENTS, WORK, None)).splitlines()
    assert len(header) == len(ours) == len(theirs)
    cells = dict(zip(re.split(" {2,}", header), theirs.split(), strict=True))
    assert cells == {
        "way": "theirs", "run s": "7.00", "min-max": "6.00-8.00", "rows/s": "0.29", "out tok/s": "1.4", "tok/s": "7",
        "computed": "-", "useful": "-", "peak MiB": "-", "ready s": "2.0", "ratio": "1.75", "x floor": "-",
        "equal": "0/2", "ties": "1", "others": "30%",
    }  # fmt: skip
    assert "25.0%" in ours
    assert "75%" in ours


def test_the_floor_says_what_it_is_made_of() -> None:
    assert floor_text(FLOOR) == (
        "floor 2.00 s: 0.030 TFLOP at 15 GFLOP/s (10 to 30 between the runs; registers alone 20), or 1.0 GB at 2.0 GB/s"
    )


def test_the_numbers_are_written_out_whole() -> None:
    written = json.loads(json.dumps(as_json(rows(RUNS, AGREEMENTS, WORK, FLOOR.seconds), RUNS, FLOOR)))
    assert [way["way"] for way in written["ways"]] == ["ours", "theirs"]
    assert [one["run_s"] for one in written["ways"][1]["runs"]] == [8.0, 6.0, 7.0]
    assert written["floor_s"] == 2.0
    assert written["ways"][1]["agreement"]["wrong"] == ["theirs, row 1: ..."]

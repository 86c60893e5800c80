"""plan --simulate from the outside: how workers are written, and what a person and a script read."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from batchrun.cli_report import plan_text
from batchrun.errors import NotMeasured
from batchrun.plan.plan import Plan
from batchrun.plan.sharing import Sharing
from batchrun.tune.fleet import Crew, Fleet
from tests.cli.fake_library import Library, Run
from tests.cli.test_report import SUMMARY

PLAN = Plan(Path("/data/out.batchrun/plan"), SUMMARY, ())
FLEET = Fleet(
    label="2026-11-30 on cpu, float32",
    are_lengths_known=True,
    is_sampled=False,
    num_simulated=100,
    crews=(
        Crew(1, 12345.0, 5.2, 8.573, 0.87345, 4_682_000, 1.0, 0.0),
        Crew(64, 225.0, 7.14, 10.0, 0.5, 11_000_000, 1.0849, 0.0),
    ),
)


@pytest.fixture
def planned(library: Library) -> Library:
    library.made, library.fleet = PLAN, FLEET
    return library


@pytest.mark.parametrize(
    ("text", "workers", "device"),
    [
        ("8", (8,), None),
        ("4,1,2,4", (1, 2, 4), None),
        ("1..64", (1, 2, 4, 8, 16, 32, 64), None),
        ("3..10", (3, 6, 10), None),
        ("5..5", (5,), None),
        ("8xh100-80gb", (8,), "h100-80gb"),
        ("1..4xl4", (1, 2, 4), "l4"),
        ("2\u00d7measured/box,x.json", (2,), "measured/box,x.json"),
    ],
)
def test_workers_are_numbers_with_a_device_behind_or_not(
    planned: Library, run: Run, text: str, workers: tuple[int, ...], device: str | None
) -> None:
    result = run("plan", "a", "-o", "out", "--simulate", text, "--cost-per-hour", "2.5")
    assert result.exit_code == 0, result.stderr
    assert planned.simulated == [(device, workers, 2.5)]


@pytest.mark.parametrize(
    "text", ["0", "0..4", "x", "8x", "h100-80gb", "4..2", "1,,2", "-1", "1.5", "1..", "8 h100-80gb"]
)
def test_what_is_no_number_of_workers_is_refused(planned: Library, run: Run, text: str) -> None:
    result = run("plan", "a", "-o", "out", "--simulate", text)
    assert (result.exit_code, planned.jobs) == (2, [])
    assert result.stderr == (
        "error: --simulate should be numbers of workers such as 8, 1,2,4 or 1..64, or with a device 8xh100-80gb, "
        f"not {text!r}\n"
    )


def test_a_price_is_of_workers(planned: Library, run: Run) -> None:
    result = run("plan", "a", "-o", "out", "--cost-per-hour", "2.5")
    assert (result.exit_code, planned.jobs) == (2, [])
    assert "say how many with --simulate" in result.stderr
    assert run("plan", "a", "-o", "out", "--simulate", "1", "--cost-per-hour", "0").exit_code == 2


def test_both_may_stand_in_the_file_of_a_job(planned: Library, run: Run, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('inputs = "a"\noutput = "out"\nsimulate = "2xl4"\ncost-per-hour = 3\n')
    assert run("plan", "-C", "job.toml").exit_code == 0
    assert planned.simulated == [("l4", (2,), 3.0)]
    assert run("submit", "-C", "job.toml").exit_code == 0


def test_without_it_nothing_is_simulated(planned: Library, run: Run) -> None:
    shown = run("plan", "a", "-o", "out")
    assert planned.simulated == []
    assert "workers" not in shown.stdout
    assert json.loads(run("plan", "a", "-o", "out", "--json").stdout)["fleet"] is None


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_without_a_measurement_the_plan_is_made_and_the_rest_is_said(
    planned: Library, run: Run, form: tuple[str, ...]
) -> None:
    """The whole plan was refused. Asked for and not given is an error all the same."""
    planned.not_measured = NotMeasured("--simulate: m was not measured here; batchrun tune m measures it")
    result = run("plan", "a", "-o", "out", "--simulate", "1..4", *form)
    assert (result.exit_code, len(planned.jobs)) == (2, 1)
    assert result.stderr.splitlines()[-1] == f"error: {planned.not_measured}"
    if form:
        assert json.loads(result.stdout)["fleet"] is None
    else:
        assert result.stdout == plan_text(PLAN, None, Sharing(True), how_to_estimate="batchrun tune echo") + "\n"


def lines(fleet: Fleet) -> list[str]:
    shown = plan_text(PLAN, None, Sharing(True), fleet).splitlines()
    first = next(at for at, line in enumerate(shown) if line.startswith("workers"))
    return shown[first : first + len(fleet.crews) + 2]


def test_a_line_for_each_number_of_workers(planned: Library, run: Run) -> None:
    assert lines(FLEET) == [
        "workers              time       cost prefix hit        computed imbalance",
        "               1    3h25m       8.57      87.3%       4,682,000      1.00",
        "              64    3m45s      10.00      50.0%      11,000,000      1.08",
        "          2026-11-30 on cpu, float32 · 5.2s to 7.14s of it to start and publish",
    ]
    assert "\n".join(lines(FLEET)) in run("plan", "a", "-o", "out", "--simulate", "1,64").stdout


def test_without_a_price_there_is_no_column_for_it() -> None:
    free = replace(FLEET, crews=(replace(FLEET.crews[0], start_s=0.0, cost=None),))
    assert lines(free) == [
        "workers              time prefix hit        computed imbalance",
        "               1    3h25m      87.3%       4,682,000      1.00",
        "          2026-11-30 on cpu, float32 · without starting",
    ]


def test_what_a_sample_leaves_open_is_said() -> None:
    crews = tuple(replace(crew, error=error) for crew, error in zip(FLEET.crews, (0.052, 0.347), strict=True))
    sampled = replace(FLEET, is_sampled=True, num_simulated=3412, are_lengths_known=False, crews=crews)
    assert lines(sampled)[-1] == (
        "          2026-11-30 on cpu, float32 · 5.2s to 7.14s of it to start and publish · "
        "outputs half as long as allowed · by 3,412 rows, within 5% to 35%"
    )


def test_json_has_the_same(planned: Library, run: Run) -> None:
    shown = json.loads(run("plan", "a", "-o", "out", "--simulate", "1,64", "--json").stdout)["fleet"]
    assert shown == asdict(FLEET) | {"crews": [asdict(crew) for crew in FLEET.crews]}
    assert list(shown["crews"][0]) == [
        "workers", "time_s", "start_s", "cost", "hit_rate", "computed_tokens", "imbalance", "error",
    ]  # fmt: skip

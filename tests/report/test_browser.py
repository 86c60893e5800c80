"""The page in a real browser: no complaint, nothing fetched, no sideways scrolling, in the light, dark and on paper."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchrun import planning
from batchrun.report.report import write_report
from batchrun.stop import StopRequest
from tests.report.test_report import nasty as nasty
from tests.run.conftest import EchoJob

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs a driver for the browser: pip install -e '.[browser]'"
)
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
FOUND = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(
    FOUND is None, reason=f"needs a browser, one of {', '.join(BROWSERS)}: apt-get install chromium-headless-shell"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # Root, as in a container, cannot have Chromium's sandbox.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        with driver.chromium.launch(executable_path=FOUND, args=arguments) as started:
            yield started


@pytest.fixture
def page_of(nasty: EchoJob) -> Path:
    nasty.submit(prompt_col="prompt", params_col="<img src=x onerror=alert(1)>", max_tokens=30)
    return write_report(nasty.out).page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_the_page_is_shown_without_a_complaint(
    browser: Any, page_of: Path, tmp_path: Path, scheme: str, width: int
) -> None:
    complaints: list[str] = []
    fetched: list[str] = []
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: fetched.append(request.url))
    page.goto(page_of.as_uri())
    page.screenshot(path=str(tmp_path / "page.png"), full_page=True)
    assert complaints == []
    assert [url for url in fetched if not url.startswith("data:")] == [page_of.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("script").count() == 0
    assert page.locator("svg:visible").count() >= 8
    assert (tmp_path / "page.png").stat().st_size > 20_000
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 384) == (scheme == "dark")
    smallest = page.evaluate(
        "Math.min(...[...document.querySelectorAll('svg text')].map(e => e.getBoundingClientRect().height))"
    )
    assert smallest >= 9, "text in a picture is too small to read"
    page.close()


def test_the_verdict_is_above_the_fold_and_the_text_is_the_datas_own(browser: Any, page_of: Path) -> None:
    page = browser.new_page(viewport={"width": 1200, "height": 700})
    page.goto(page_of.as_uri())
    assert page.locator("h1").inner_text() == "Complete, with 8 failed rows"
    assert page.locator("h1").bounding_box()["y"] < 100
    assert page.locator(".tile").last.bounding_box()["y"] < 700
    assert page.locator("text=alert('p')").count() >= 1
    page.close()


def test_the_page_prints(browser: Any, page_of: Path, tmp_path: Path) -> None:
    page = browser.new_page()
    page.goto(page_of.as_uri())
    page.pdf(path=str(tmp_path / "page.pdf"), format="A4")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    page.close()


def test_a_report_of_a_planned_job_is_shown(browser: Any, nasty: EchoJob) -> None:
    planning.plan(nasty.job(prompt_col="prompt"), lambda event: None, StopRequest())
    page = browser.new_page()
    page.goto(write_report(nasty.out).page.as_uri())
    assert page.locator("h1").inner_text() == "Planned, not run yet"
    page.close()

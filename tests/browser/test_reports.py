"""Reports of a simulation and of a plan: one file each, opened from disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.chromium import Browser
from tests.waiting import HANG_S

pytestmark = pytest.mark.timeout(600)
TWO_BY_TWO = Path(__file__).parents[2] / "configs" / "two_by_two.toml"
REQUESTS = 12_000
LARGEST_BYTES = 5_000_000


def report(folder: Path, *arguments: str) -> Path:
    file = folder / "report.html"
    done = subprocess.run(
        [sys.executable, "-m", "prfaas", *arguments, "--html", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return file


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulation")
    options = ("--policy", "paper", "adaptive", "--requests", str(REQUESTS))
    return report(folder, "simulate", str(TWO_BY_TWO), *options)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report(tmp_path_factory.mktemp("plan"), "plan", str(TWO_BY_TWO))


def test_a_simulation_opens_from_disk_and_is_replayed(
    browser: Browser, simulation: Path, pictures: Path
) -> None:
    assert simulation.stat().st_size < LARGEST_BYTES
    browser.open(simulation.as_uri())
    browser.until("return document.querySelector('main[data-report=simulation]') !== null")
    drawn = "return document.querySelector('main').dataset.drawnAt"
    browser.until(f"{drawn} !== undefined")
    first = browser.script(drawn)
    assert browser.all("[data-node]") and browser.all("[data-link]")
    browser.script(
        "const scrub = document.querySelector('#scrub');"
        "scrub.value = (Number(scrub.min || 0) + Number(scrub.max)) / 2;"
        "scrub.dispatchEvent(new Event('input', {bubbles: true}));"
    )
    middle = browser.until(
        f"const it = (() => {{ {drawn} }})(); return it !== arguments[0] && it", first
    )
    browser.save_picture(pictures / "simulation-report.png")
    browser.click("#play")
    browser.until(f"return (() => {{ {drawn} }})() !== arguments[0]", middle)
    browser.click("#play")
    for about in ("node", "link"):
        browser.click(f"[data-{about}]")
        browser.until(
            "return document.querySelector('#details')?.dataset.about === arguments[0]", about
        )
        browser.press("\ue00c")  # Escape
    options = browser.script("return document.querySelectorAll('#run option').length")
    assert options >= 2
    assert browser.requested() == []


def test_a_plan_opens_from_disk(browser: Browser, plan: Path, pictures: Path) -> None:
    assert plan.stat().st_size < LARGEST_BYTES
    browser.open(plan.as_uri())
    browser.until("return document.querySelector('main[data-report=plan]') !== null")
    browser.until("return document.querySelectorAll('[data-node]').length > 0")
    assert browser.all("[data-link]")
    browser.save_picture(pictures / "plan-report.png")
    assert browser.requested() == []

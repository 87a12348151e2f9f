"""These tests need a browser and an environment of their own, so they are collected only when their
folder is named: `make test-browser`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.loop_thread import LoopThread
from tests.measured import pytest_terminal_summary  # noqa: F401  # a hook of pytest

if TYPE_CHECKING:
    from tests.browser.chromium import Browser

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """None: pytest decides."""
    named = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(FOLDER) for path in named) else True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pictures",
        type=Path,
        default=ROOT / "out" / "pictures",
        help="Folder for the pictures that the tests take: docs/img for those of the documents.",
    )


@pytest.fixture(scope="session")
def pictures(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.config.getoption("--pictures")
    return folder


@pytest.fixture(scope="session")
def loop_thread() -> Iterator[LoopThread]:
    with LoopThread() as started:
        yield started


@pytest.fixture(scope="session")
def started_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert find_spec("selenium"), "selenium is not installed; `make test-browser` installs it"
    from tests.browser.chromium import running_browser

    with running_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(started_browser: Browser) -> Iterator[Browser]:
    """Without cookies. Afterwards the page has logged no error."""
    started_browser.forget()
    started_browser.set_size()
    started_browser.prefer("light")
    yield started_browser
    problems = started_browser.problems()
    started_browser.forget()
    assert not problems, "the browser has logged:\n" + "\n".join(problems)

"""Debian's Chromium, driven by selenium: what a page shows, what it logs and what it requests."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests.waiting import PATIENCE_S, wait_until

BROWSERS, DRIVER = ("chromium", "chromium-browser"), "chromedriver"
MISSING = (
    "was not found: the tests need a browser and its driver; on Debian, install them with "
    "`apt-get install chromium chromium-driver`"
)
WIDTH, HEIGHT = 1440, 900
SCRIPT_S = 120.0  # for one script in the page; only a hang takes so long
_LOCAL_SCHEMES = ("data", "blob", "about", "chrome", "file", "devtools")

# Notes of each scene what the page shows of it, and when it was drawn, on the page's own clock.
_RECORDER = """
const main = document.querySelector("main");
window.drawn = [];
window.said = [];
window.late_s = 0;
const note = () => {
  const shown = {};
  for (const {dataset} of document.querySelectorAll("[data-link], [data-node], [data-request]"))
    shown[dataset.link ?? dataset.name ?? dataset.request] =
      dataset.verdict ?? dataset.status ?? dataset.route;
  window.drawn.push({drawn_s: Date.now() / 1000, scene_s: Number(main.dataset.drawnAt), shown});
};
new MutationObserver(note).observe(main, {attributeFilter: ["data-drawn-at"]});
note();
const status = document.querySelector("#status");
new MutationObserver(() => window.said.push(status.textContent))
  .observe(status, {subtree: true, childList: true, characterData: true});
let before = performance.now();
setInterval(() => {
  const now = performance.now();
  window.late_s = Math.max(window.late_s, (now - before) / 1000 - 0.05);
  before = now;
}, 50);
"""

_FRAMES = """
const [seconds, done] = arguments;
const start = performance.now();
let before = start, frames = 0, longest = 0;
const frame = (now) => {
  frames += 1;
  longest = Math.max(longest, now - before);
  before = now;
  if (now - start < seconds * 1000) requestAnimationFrame(frame);
  else done({frames, seconds: (now - start) / 1000, longest_ms: longest});
};
requestAnimationFrame(frame);
"""


class Browser:
    def __init__(self, driver: Chrome) -> None:
        self._driver = driver

    def open(self, url: str) -> None:
        self._driver.get(url)
        self.point_away()

    def point_away(self) -> None:
        """Moves the pointer into the corner: the table of requests stands still under it."""
        at_corner = {"type": "mouseMoved", "x": 1, "y": 1}
        self._driver.execute_cdp_cmd("Input.dispatchMouseEvent", at_corner)

    def reload(self) -> None:
        self._driver.refresh()

    def forget(self) -> None:
        """Leaves the page, and drops cookies and what was logged and stored so far."""
        self._driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
        self._driver.get("about:blank")
        self.problems()
        self.requested()

    # What is shown --------------------------------------------------------------------------------

    def one(self, css: str) -> WebElement:
        """The first element, once there is one."""
        self.until("return document.querySelector(arguments[0]) !== null", css)
        return self._driver.find_element(By.CSS_SELECTOR, css)

    def all(self, css: str) -> list[WebElement]:
        return self._driver.find_elements(By.CSS_SELECTOR, css)

    def text(self, css: str) -> str:
        """All text of the first such element, also where it is not visible."""
        return str(self.script("return document.querySelector(arguments[0])?.textContent", css))

    def has(self, css: str) -> bool:
        return bool(self.script("return document.querySelector(arguments[0]) !== null", css))

    def click(self, css: str) -> None:
        """Scrolls to it first, as a user does."""
        found = self.one(css)
        self.script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", found)
        found.click()

    def script(self, code: str, *arguments: Any) -> Any:
        return self._driver.execute_script(code, *arguments)

    def until(self, code: str, *arguments: Any, within_s: float = PATIENCE_S) -> Any:
        """Waits until the script returns something true, and returns it."""
        found: Any = None

        def is_found() -> bool:
            nonlocal found
            found = self.script(code, *arguments)
            return bool(found)

        try:
            wait_until(is_found, within_s=within_s)
        except AssertionError:
            raise AssertionError(f"never true: {code} {arguments}\n{self.describe()}") from None
        return found

    def describe(self) -> str:
        """What the page has, for the message of a failed test."""
        title, body = self._driver.title, self.script("return document.body?.innerText ?? ''")
        return f"{self._driver.current_url} {title!r}\n{body[:3000]}\n{self.problems()}"

    def press_button(self, css: str) -> None:
        """With the keyboard: what moves away under the pointer keeps the focus."""
        self.script("arguments[0].focus()", self.one(css))
        self.press("\ue007")  # Enter

    def save_picture(self, file: Path) -> None:
        """Of the top of the page."""
        self.point_away()
        self.script("window.scrollTo({top: 0, behavior: 'instant'})")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(self._driver.get_screenshot_as_png())

    def set_size(self, width: int = WIDTH, height: int = HEIGHT) -> None:
        self._driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )

    def prefer(self, scheme: Literal["light", "dark"], *, motion: bool = True) -> None:
        """What the user has set in the system."""
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "no-preference" if motion else "reduce"},
        ]
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def press(self, *keys: str) -> None:
        """On the element that has the focus."""
        self._driver.switch_to.active_element.send_keys(*keys)

    # Time -----------------------------------------------------------------------------------------

    def record_changes(self) -> None:
        """From now on, until the page is left."""
        self.script(_RECORDER)

    def first_drawn(self, of: str, *values: str, since_s: float) -> dict[str, float]:
        """Waits until the page has drawn a node, a link or a request with one of these values, of
        a scene that was made after this time. Its times, and how late the page's own timers were
        for want of a core."""
        return dict(
            self.until(
                "const [of, values, since_s] = arguments;"
                "const found = window.drawn.find((one) =>"
                " one.scene_s >= since_s && values.includes(one.shown[of]));"
                "return found && {...found, shown: null, late_s: window.late_s};",
                *(of, list(values), since_s),
            )
        )

    def heard(self, text: str) -> None:
        """Waits until the status line has said it, which screen readers read aloud."""
        self.until("return window.said.some((one) => one.includes(arguments[0]))", text)

    def frames(self, seconds: float) -> dict[str, float]:
        """Animation frames in this time."""
        return dict(self._driver.execute_async_script(_FRAMES, seconds))

    def metrics(self) -> dict[str, float]:
        """Chromium's counters of the page, such as `ScriptDuration` in seconds."""
        self._driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        found = self._driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return {one["name"]: one["value"] for one in found}

    # What went on ---------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Errors and warnings in the browser's console since the last call: of scripts, of the
        content security policy, of requests."""
        levels = ("SEVERE", "WARNING")
        return [one["message"] for one in self._driver.get_log("browser") if one["level"] in levels]

    def requested(self) -> list[str]:
        """The URLs that were requested over a network since the last call."""
        events = [
            json.loads(one["message"])["message"] for one in self._driver.get_log("performance")
        ]
        urls = [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ] + [
            event["params"]["url"]
            for event in events
            if event["method"] == "Network.webSocketCreated"
        ]
        return [url for url in urls if urlsplit(url).scheme not in _LOCAL_SCHEMES]

    def other_hosts(self, own: str) -> set[str]:
        """Of the requests since the last call."""
        found = {urlsplit(url).netloc for url in self.requested()}
        return found - {urlsplit(own).netloc}


@contextmanager
def running_browser(profile: Path) -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which(DRIVER)
    assert program is not None, f"{BROWSERS[0]} {MISSING}"
    assert driver is not None, f"{DRIVER} {MISSING}"
    options = ChromeOptions()
    options.binary_location = program
    for argument in (
        "--headless=new",
        f"--window-size={WIDTH},{HEIGHT}",
        "--hide-scrollbars",
        "--lang=en",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-dev-shm-usage",  # containers have little of it
        "--force-color-profile=srgb",
        f"--user-data-dir={profile}",
        # Nothing leaves this machine, whatever a page or the browser itself tries.
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
    ):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium's sandbox refuses to run as root
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = Chrome(options=options, service=Service(driver))
    try:
        started.set_script_timeout(SCRIPT_S)
        browser = Browser(started)
        browser.set_size()
        browser.prefer("light")
        yield browser
    finally:
        started.quit()

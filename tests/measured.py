"""Shows what tests have measured (`record_property`) at the end of a run, as a hook of pytest."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        if report.when == "call" and report.user_properties:
            found = ", ".join(f"{name} {value}" for name, value in report.user_properties)
            terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {found}")

"""The table of `docs/faults.md`, from what a campaign has seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prfaas_lab.faults.episode import FaultResult

BEGIN, END = "<!-- campaign -->", "<!-- /campaign -->"
_HEAD = (
    "| fault | engines | what the clients saw | retries | lasted | recovered after |",
    "|---|---|---|---|---|---|",
)


def written(text: str, seen: Mapping[str, Sequence[FaultResult]]) -> str:
    """`text` with everything between the marks made anew."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    assert found, f"the file has no {BEGIN} ... {END}"
    rows = [_row(engine, one) for engine, several in seen.items() for one in several]
    return before + "\n".join([BEGIN, *_HEAD, *rows, END]) + after


def _row(engine: str, seen: FaultResult) -> str:
    verdicts = ", ".join(f"{number} {verdict}" for verdict, number in seen.verdicts.items())
    lasted = f"{seen.lasted_s:.0f} s" if seen.lasted_s >= 1 else ""
    cells = [seen.what, engine, verdicts, str(seen.retries), lasted, f"{seen.recovered_s:.1f} s"]
    return f"| {' | '.join(cells)} |"

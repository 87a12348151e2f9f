from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# They run where vLLM is installed, which is an environment of its own: `make test-vllm`.
collect_ignore = [] if find_spec("vllm") else ["vllm"]

# Nearly the same examples in every run (Hypothesis also tries constants of the modules that happen
# to be loaded), and no judgement of speed: a busy machine is slow to make and to run examples.
settings.register_profile(
    "prfaas", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("prfaas")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--report", type=Path, help="Put what tests/faults has seen into this file's table."
    )

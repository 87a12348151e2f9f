from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The models are tiny, and several test processes share the cores: a second OpenMP thread mostly
# spins until the first one gets a core. Set before torch is loaded, for child processes as well.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# They run where vLLM or Ray is installed, in environments of their own: `make test-vllm` and
# `make test-cluster`.
collect_ignore = [] if find_spec("vllm") else ["vllm"]
collect_ignore += [] if find_spec("ray") else ["studies/clusters"]

# Nearly the same examples in every run (Hypothesis also tries constants of the modules that happen
# to be loaded), and no judgement of speed: a busy machine is slow to make and to run examples.
settings.register_profile(
    "prfaas", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("prfaas")

# The files of a group share servers that take long to start, so one test process runs them all.
# Each entry is a tuple of paths or of beginnings of paths.
TOGETHER = (
    ("tests/engine/",),  # models in this process, and what transformers generates with them
    ("tests/node/test_cache_events.py", "tests/node/test_kept_answers.py"),
    ("tests/tracing/slow_ways/",),
    (
        *("tests/faults/test_campaign.py", "tests/faults/test_no_way.py"),
        *("tests/faults/test_pressure.py", "tests/faults/test_soak.py"),
    ),
    (
        *("tests/gateway/dispatch/", "tests/gateway/planning/", "tests/gateway/prompt_lists/"),
        "tests/gateway/following/test_through_processes.py",
        *("tests/gateway/test_known_fields.py", "tests/gateway/test_long_term.py"),
        *("tests/gateway/test_process.py", "tests/gateway/test_shutdown.py"),
        *("tests/gateway/test_stop.py", "tests/gateway/test_tenants.py"),
        "tests/gateway/test_wan.py",
    ),
    (
        *("tests/vllm/test_events.py", "tests/vllm/test_faults.py", "tests/vllm/test_gateway.py"),
        *("tests/vllm/test_faults_long.py", "tests/vllm/test_handoff.py"),
        "tests/vllm/test_hostile.py",
        *("tests/vllm/test_servers.py", "tests/vllm/test_unlike_engines.py"),
        *("tests/vllm/test_kept_answers.py", "tests/vllm/test_parameters.py"),
    ),
)
# The tests of these files share nothing and take long together: each is a group of its own.
APART = ("tests/goldens/test_goldens.py",)
# The tests of one group need the servers of one model after those of another. Two test processes
# have one model each.
PAIRS = "tests/vllm/test_events.py"
PAIR_MODELS = ("falcon-h1", "gemma3")
# These take longest and begin first, so that in the end no process is left alone with one of them.
LONGEST = (
    *("tests/faults/test_campaign.py", "tests/faults/clusters/test_cluster_faults.py"),
    *("tests/launch/test_regions.py", "tests/promises/test_served_while_a_node_lives.py"),
    *("tests/promises/test_drawn_cases_live.py", "tests/promises/test_drawn_cases.py"),
    "tests/promises/test_floods.py",
    *(f"{PAIRS}:{model}" for model in PAIR_MODELS),
    *("tests/engine/", "tests/gateway/dispatch/", "tests/deploy/test_end_to_end.py"),
    "tests/tracing/slow_ways/",
    *("tests/tracing/test_otlp.py", "tests/node/test_handoff.py", "tests/node/test_faults.py"),
    *("tests/gateway/test_models.py", "tests/service/test_schemathesis.py"),
    *("tests/transport/test_faults_with_workers.py", "tests/sim/test_agreement.py"),
    "tests/node/test_compare.py",
    *("tests/gateway/test_rolling_upgrade.py", "tests/gateway/test_paused.py"),
    *("tests/security/test_rotation.py", "tests/security/test_init_deployment.py"),
    *("tests/cli/test_node.py", "tests/cli/test_up.py"),
    *("tests/gateway/api/test_hostile.py", "tests/transport/test_faults.py"),
    *("tests/measure/test_serve_bench.py", "tests/kvd/test_faults.py"),
)


def group_of(test: str) -> str:
    file, _, name = test.partition("::")
    if file in APART:
        return test
    group = next((group[0] for group in TOGETHER if file.startswith(group)), file)
    if group != PAIRS:
        return group
    parameters = name.partition("[")[2]
    model = next((model for model in PAIR_MODELS if model in parameters), PAIR_MODELS[0])
    return f"{PAIRS}:{model}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {group: at for at, group in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(group_of(item.nodeid), len(place)))


@pytest.hookimpl(optionalhook=True)  # pytest-xdist calls it, where it is installed
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class LoadGroups(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    # The groups begin in the order of the tests, not those with the most tests first.
    config.option.loadscopereorder = False
    return LoadGroups(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--report", type=Path, help="Put what tests/faults has seen into this file's table."
    )


class Complaints(logging.Handler):
    """What asyncio and uvloop can only log: exceptions that no task retrieved, tasks that were
    destroyed while pending, connections that were not closed."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._found.append(logging.Formatter().format(record))

    def check(self) -> None:
        found, self._found = self._found, []
        assert not found, "asyncio has logged:\n" + "\n".join(found)


@pytest.fixture(scope="session", autouse=True)
def asyncio_complaints() -> Iterator[Complaints]:
    handler = Complaints()
    logger = logging.getLogger("asyncio")
    logger.addHandler(handler)
    gc.collect()
    gc.freeze()  # what was imported so far is not looked through again at the end of every module
    yield handler
    gc.collect()
    logger.removeHandler(handler)
    handler.check()


@pytest.fixture(scope="module", autouse=True)
def _no_garbage_that_complains(asyncio_complaints: Complaints) -> Iterator[None]:
    """Coroutines, tasks and sockets that were dropped in a reference cycle warn when the garbage
    collector finds them. It looks for them once per module, so that the warning names the module
    that dropped them. Once per test would take minutes."""
    yield
    gc.collect()
    asyncio_complaints.check()


@pytest.fixture(autouse=True)
def _no_complaints(asyncio_complaints: Complaints) -> Iterator[None]:
    yield
    gc.collect(1)  # young objects only, which is quick
    asyncio_complaints.check()

"""The pods of the rendered manifests serve, survive and are replaced."""

from __future__ import annotations

import hashlib
import secrets
import socket
import ssl
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import urlsplit

import pytest

from prfaas.launch.request_outcomes import RequestOutcome
from tests.browser.loop_thread import LoopThread
from tests.kubernetes.deployment import (
    HOMES,
    LONG_TOKENS,
    MEMBER_PORTS,
    SHORT_TOKENS,
    KubernetesDeployment,
    get,
    running,
)
from tests.kubernetes.expansion import PROBES
from tests.kubernetes.load import Load
from tests.kubernetes.podman import Podman
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.timeout(1200)  # only a hang takes so long
USER = "10001"
READ_AGAIN = "keys and certificates have been read again"
ALL_LINES = 1_000_000
SEEDS = 5  # prompts
TOGETHER = (("east", "north"), ("west", "south"))


@pytest.fixture(scope="module")
def deployment(
    podman: Podman,
    image: str,
    loop_thread: LoopThread,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[KubernetesDeployment]:
    failed = request.session.testsfailed
    with running(podman, loop_thread, tmp_path_factory.mktemp("deployment")) as made:
        yield made
        if request.session.testsfailed > failed:
            print(made.all_logs())  # noqa: T201


def test_a_completion_is_prefilled_in_another_cluster(deployment: KubernetesDeployment) -> None:
    for first, home in enumerate(HOMES):
        assert _asked(deployment, home, SHORT_TOKENS, first).decode.startswith(f"{home}-")
        # On this scale, overheads count as much as prefills: a route may be another one at times.
        seeds = range(first, first + SEEDS * len(HOMES), len(HOMES))  # none is cached
        outcomes = (_asked(deployment, home, LONG_TOKENS, seed) for seed in seeds)
        sent = next((one for one in outcomes if one.route == "remote"), None)
        assert sent is not None, f"{SEEDS} long prompts of {home} were prefilled there"
        assert sent.prefill.startswith(("north-", "south-")), sent
        assert sent.decode.startswith(f"{home}-"), sent


def _asked(deployment: KubernetesDeployment, home: str, tokens: int, seed: int) -> RequestOutcome:
    request_id = secrets.token_hex(8)
    answer = deployment.complete(home, tokens, seed, request_id)
    assert answer["usage"]["prompt_tokens"] == tokens
    outcome = deployment.outcome(home, request_id)
    assert outcome.outcome == "completed", outcome
    return outcome


def test_no_container_is_root_or_can_write(deployment: KubernetesDeployment) -> None:
    for cluster in deployment.clusters.values():
        for pod in cluster.pods.values():
            for container in pod.containers:
                found = cluster.kubelet.run_in(pod, container, "cat", "/proc/1/status")
                status = dict(line.split(":\t", 1) for line in found.splitlines())
                assert status["Uid"].split() == [USER] * 4
                assert status["Gid"].split() == [USER] * 4
                assert {status[name] for name in ("CapPrm", "CapEff", "CapBnd")} == {"0" * 16}
                assert status["NoNewPrivs"] == "1"
                mounts = cluster.kubelet.run_in(pod, container, "cat", "/proc/1/mounts")
                (root,) = (one for one in mounts.splitlines() if one.split()[1] == "/")
                assert "ro" in root.split()[3].split(",")


def test_every_container_passes_every_probe(deployment: KubernetesDeployment) -> None:
    for cluster in deployment.clusters.values():
        for pod in cluster.pods.values():
            for container in pod.containers:
                for probe in PROBES:
                    assert cluster.kubelet.failed_probe(pod, container, probe) == ""


def test_a_process_that_hangs_is_not_live(deployment: KubernetesDeployment) -> None:
    cluster = deployment.clusters["west"]
    pod = cluster.pods["west-1"]
    for container in pod.containers:
        with cluster.kubelet.stopped(pod, container):
            assert cluster.kubelet.failed_probe(pod, container, "livenessProbe")
        assert cluster.kubelet.failed_probe(pod, container, "livenessProbe") == ""
    deployment.wait_until_all_are_used()


def test_the_loss_of_a_pod_fails_no_request(deployment: KubernetesDeployment) -> None:
    """Of a PD cluster, and of the PrfaaS cluster with the fastest link."""
    with Load(deployment) as load:
        load.wait_for_more(4)
        for name in ("east-0", "north-0"):
            cluster = deployment.clusters[name.partition("-")[0]]
            cluster.lose(cluster.pods[name])
            load.wait_for_more(4)
            cluster.restore()
            deployment.wait_until_all_are_used()
            load.wait_for_more(4)
    load.check()


def test_keys_and_certificates_are_rotated_without_a_restart(
    deployment: KubernetesDeployment,
) -> None:
    before = _container_ids(deployment)
    old = deployment.metrics_key
    certificates = _certificates(deployment)
    with Load(deployment) as load:
        load.wait_for_more(2)
        for options in (
            *(("--rotate-keys", step) for step in ("add", "use", "remove")),
            ("--renew",),
        ):
            read = _times_read(deployment)
            deployment.render_and_apply(*options)
            wait_until(partial(_all_have_read_again, deployment, read))
            load.wait_for_more(4)
    load.check()
    assert _container_ids(deployment) == before
    renewed = _certificates(deployment)
    assert certificates.keys() == renewed.keys()
    assert not set(certificates.values()) & set(renewed.values())
    new = deployment.metrics_key
    assert new != old
    for url, tls in _metrics(deployment).items():
        assert get(url, new, tls)
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(url, old, tls)
        refused.value.close()
        assert refused.value.code == 401


def test_every_pod_is_replaced_without_a_failed_request(
    deployment: KubernetesDeployment, record_property: Callable[[str, object], None]
) -> None:
    before = _container_ids(deployment)
    with Load(deployment) as load:
        load.wait_for_more(2)
        # Each cluster is rolled by itself. Two at a time are a PD cluster and a PrfaaS cluster.
        for together in TOGETHER:
            with ThreadPoolExecutor(len(together)) as pool:
                list(pool.map(lambda name: deployment.clusters[name].roll_all(), together))
            load.check()
        deployment.wait_until_all_are_used()
        load.wait_for_more(4)
    load.check()
    record_property("requests", sum(load.served.values()))
    after = _container_ids(deployment)
    assert len(after) == len(before)
    assert not set(before.values()) & set(after.values())


def _container_ids(deployment: KubernetesDeployment) -> dict[str, str]:
    found: dict[str, str] = {}
    for cluster in deployment.clusters.values():
        for pod in cluster.pods.values():
            found |= cluster.kubelet.ids(pod)
    return found


def _times_read(deployment: KubernetesDeployment) -> dict[str, int]:
    """How often each container has read its keys and certificates again."""
    return {
        pod.podman_name(container): cluster.kubelet.logs(pod, container, ALL_LINES).count(
            READ_AGAIN
        )
        for cluster in deployment.clusters.values()
        for pod in cluster.pods.values()
        for container in pod.containers
    }


def _all_have_read_again(deployment: KubernetesDeployment, before: dict[str, int]) -> bool:
    return all(now > before[name] for name, now in _times_read(deployment).items())


def _metrics(deployment: KubernetesDeployment) -> dict[str, ssl.SSLContext]:
    """Every URL that the metrics key opens in a pod."""
    found = {f"{deployment.url(home)}/metrics": deployment.client_tls for home in HOMES}
    for pod in deployment.members.values():
        for port in MEMBER_PORTS.values():
            found[f"https://{pod.place.address}:{port}/metrics"] = deployment.member_tls
    return found


def _certificates(deployment: KubernetesDeployment) -> dict[str, str]:
    """What each service shows to a client, by URL."""
    found = {}
    for url, tls in _metrics(deployment).items():
        at = urlsplit(url)
        assert at.hostname and at.port
        with (
            socket.create_connection((at.hostname, at.port), timeout=PATIENCE_S) as plain,
            tls.wrap_socket(plain, server_hostname=at.hostname) as connection,
        ):
            shown = connection.getpeercert(binary_form=True)
            assert shown is not None
            found[url] = hashlib.sha256(shown).hexdigest()
    return found

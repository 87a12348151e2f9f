"""Cases on a Ray or Dask cluster that exists already.

`Connection.call` runs one case on the cluster and waits for its outcome; joblib gives a thread of
this process to each case that runs. joblib's own backends for the two are not used: Ray's returns
no result before the last one, and Dask's (joblib 1.6) waits forever for a case whose worker has
died.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeAlias

from prfaas.errors import InputError
from prfaas.studies.parallel.packed_case import Outcome, PackedCase, run_packed
from prfaas.studies.parallel.workers import ClusterAddress

CONNECT_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 30.0
POLL_S = 0.5  # how often a waiting call looks whether the study was given up


class Connection(NamedTuple):
    call: Callable[[PackedCase], Outcome]
    cores: int


class _Client(NamedTuple):
    """What Ray and Dask have in common. A task is a future of either."""

    cores: int
    submit: Callable[[PackedCase], Any]
    wait: Callable[[Any, float], bool]  # whether the task has ended within so many seconds
    result: Callable[[Any], Outcome]
    cancel: Callable[[Any], None]


_Connect: TypeAlias = Callable[[str, bytes], Any]  # a context manager of a _Client


@contextmanager
def connected(cluster: ClusterAddress, function: bytes) -> Iterator[Connection]:
    """Connects to the cluster and sends it the packed function of a study. The end of the context
    cancels the cases that still run there."""
    if find_spec({"ray": "ray", "dask": "distributed"}[cluster.kind]) is None:
        raise InputError(
            f"the packages of {cluster.kind} are not installed",
            where="--cluster",
            fix=f"pip install 'prfaas[{cluster.kind}]'",
        )
    _check_reachable(cluster)
    connect: _Connect = _ray if cluster.kind == "ray" else _dask
    with connect(cluster.address, function) as client:
        if client.cores < 1:
            raise _unusable(cluster.kind, cluster.address, "it has no worker")
        calls = _Calls(client)
        try:
            yield Connection(calls.call, client.cores)
        finally:
            calls.close()


def _check_reachable(cluster: ClusterAddress) -> None:
    """Ray takes minutes to say that no process listens at an address."""
    host, colon, port = cluster.address.rpartition("//")[2].rpartition(":")
    if not (colon and port.isdecimal()):
        return  # ray:auto, or an address that the cluster's own client must judge
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise _unusable(cluster.kind, cluster.address, str(error)) from None


class _Calls:
    """The calls that wait for the cluster. All of them end before the connection is closed: Ray
    ends the whole process where a thread still waits for a task."""

    def __init__(self, client: _Client) -> None:
        self._client = client
        self._given_up = threading.Event()
        self._ended = threading.Condition()
        self._waiting = 0

    def call(self, packed: PackedCase) -> Outcome:
        with self._ended:
            self._waiting += 1
        try:
            return self._run(packed)
        finally:
            with self._ended:
                self._waiting -= 1
                self._ended.notify_all()

    def _run(self, packed: PackedCase) -> Outcome:
        if not self._given_up.is_set():
            task = self._client.submit(packed)
            while not self._given_up.is_set():
                if self._client.wait(task, POLL_S):
                    return self._client.result(task)
            self._client.cancel(task)
        return Outcome(packed.name, failure="the study was given up")

    def close(self) -> None:
        self._given_up.set()
        with self._ended:
            self._ended.wait_for(lambda: self._waiting == 0, CLOSE_TIMEOUT_S)


@contextmanager
def _ray(address: str, function: bytes) -> Iterator[_Client]:
    import ray

    if ray.is_initialized():
        raise InputError(
            "this process is connected to a Ray cluster already",
            where="--cluster",
            fix="call ray.shutdown() first",
        )
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _unusable("ray", address, str(error)) from None
    try:
        # A case whose worker dies would probably kill the next worker, too.
        task = ray.remote(run_packed).options(num_cpus=1, max_retries=0)
        shared = ray.put(function)
        yield _Client(
            cores=int(ray.cluster_resources().get("CPU", 0)),
            submit=lambda packed: task.remote(shared, packed),
            wait=lambda ref, within_s: bool(ray.wait([ref], timeout=within_s)[0]),
            result=ray.get,
            cancel=lambda ref: ray.cancel(ref, force=True),
        )
    finally:
        ray.shutdown()


@contextmanager
def _dask(address: str, function: bytes) -> Iterator[_Client]:
    import distributed

    try:
        client = distributed.Client(address, timeout=CONNECT_TIMEOUT_S, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise _unusable("dask", address, str(error)) from None

    def wait(future: Any, within_s: float) -> bool:
        try:
            future.exception(timeout=within_s)
        except TimeoutError:
            return False
        return True

    with client:
        threads = client.nthreads()
        if any(count > 1 for count in threads.values()):
            raise _unusable(
                "dask",
                address,
                "some of its workers have several threads, in which cases would disturb each other",
                fix="start the workers with --nthreads 1 and --nworkers",
            )
        shared = client.scatter(function, broadcast=True) if threads else None
        yield _Client(
            cores=len(threads),
            submit=lambda packed: client.submit(run_packed, shared, packed, pure=False),
            wait=wait,
            result=lambda future: future.result(),
            cancel=lambda future: future.cancel(),
        )


def _unusable(kind: str, address: str, why: str, fix: str | None = None) -> InputError:
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    return InputError(
        f"the {kind} cluster at {address} cannot be used: {' '.join(lines[:2])}",
        where="--cluster",
        fix=fix or "check that the cluster runs and that its address is right",
    )

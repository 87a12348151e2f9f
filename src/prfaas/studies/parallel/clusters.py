"""Cases on a Ray cluster that exists already.

`Connection.call` runs one case on the cluster and waits for its outcome; joblib gives a thread of
this process to each case that runs. joblib's own backend for Ray is not used: it returns no result
before the last one.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from prfaas.errors import InputError
from prfaas.studies.parallel.packed_case import Outcome, PackedCase, run_packed

CONNECT_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 30.0
POLL_S = 0.5  # how often a waiting call looks whether the study was given up


class Connection:
    """The calls that wait for the cluster. All of them end before the connection is closed: Ray
    ends the whole process where a thread still waits for a task."""

    def __init__(self, ray: Any, function: bytes, cores: int) -> None:
        self.cores = cores
        self._ray = ray
        # A case whose worker dies would probably kill the next worker, too.
        self._task = ray.remote(run_packed).options(num_cpus=1, max_retries=0)
        self._function = ray.put(function)
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
            task = self._task.remote(self._function, packed)
            while not self._given_up.is_set():
                if self._ray.wait([task], timeout=POLL_S)[0]:
                    outcome: Outcome = self._ray.get(task)
                    return outcome
            self._ray.cancel(task, force=True)
        return Outcome(packed.name, failure="the study was given up")

    def close(self) -> None:
        self._given_up.set()
        with self._ended:
            self._ended.wait_for(lambda: self._waiting == 0, CLOSE_TIMEOUT_S)


@contextmanager
def connected(address: str, function: bytes) -> Iterator[Connection]:
    """Connects to the cluster and sends it the packed function of a study. The end of the context
    cancels the cases that still run there."""
    if find_spec("ray") is None:
        raise InputError(
            "the packages of ray are not installed",
            where="--cluster",
            fix="pip install 'prfaas[ray]'",
        )
    _check_reachable(address)
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
        raise _unusable(address, str(error)) from None
    try:
        cores = int(ray.cluster_resources().get("CPU", 0))
        if cores < 1:
            raise _unusable(address, "it has no worker")
        connection = Connection(ray, function, cores)
        try:
            yield connection
        finally:
            connection.close()
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray takes minutes to say that no process listens at an address."""
    host, colon, port = address.rpartition("//")[2].rpartition(":")
    if not (colon and port.isdecimal()):
        return  # ray:auto, or an address that Ray must judge
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise _unusable(address, str(error)) from None


def _unusable(address: str, why: str) -> InputError:
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    return InputError(
        f"the ray cluster at {address} cannot be used: {' '.join(lines[:2])}",
        where="--cluster",
        fix="check that the cluster runs and that its address is right",
    )

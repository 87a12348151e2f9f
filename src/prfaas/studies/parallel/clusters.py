"""Cases on a Ray or Dask cluster that exists already.

A `Call` runs one case on the cluster and waits for its outcome. One thread of this process waits
for each case that runs. joblib's own backends for the two are not used: Ray's returns no result
before the last one, and Dask's (joblib 1.6) waits forever for a case whose worker has died.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

from prfaas.errors import InputError
from prfaas.studies.parallel.packed_case import Outcome, PackedCase, run_packed
from prfaas.studies.parallel.workers import ClusterAddress

Call: TypeAlias = Callable[[PackedCase], Outcome]
CONNECT_TIMEOUT_S = 30


class Connection(NamedTuple):
    call: Call
    cores: int


@contextmanager
def connected(cluster: ClusterAddress, function: bytes) -> Iterator[Connection]:
    """Connects to the cluster and sends it the packed function of a study. The end of the context
    cancels what still runs there."""
    with (_ray if cluster.kind == "ray" else _dask)(cluster.address, function) as connection:
        if connection.cores < 1:
            raise _unusable(cluster.kind, cluster.address, "it has no worker")
        yield connection


@contextmanager
def _ray(address: str, function: bytes) -> Iterator[Connection]:
    try:
        import ray
    except ImportError:
        raise _not_installed("ray") from None
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

        def call(packed: PackedCase) -> Outcome:
            outcome: Outcome = ray.get(task.remote(shared, packed))
            return outcome

        yield Connection(call, int(ray.cluster_resources().get("CPU", 0)))
    finally:
        ray.shutdown()


@contextmanager
def _dask(address: str, function: bytes) -> Iterator[Connection]:
    try:
        from distributed import Client
    except ImportError:
        raise _not_installed("dask") from None
    try:
        client = Client(address, timeout=CONNECT_TIMEOUT_S, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise _unusable("dask", address, str(error)) from None
    with client:
        threads = client.nthreads()
        if any(count > 1 for count in threads.values()):
            raise _unusable(
                "dask",
                address,
                "some of its workers have several threads, which would share the results in memory",
                fix="start the workers with --nthreads 1 and --nworkers",
            )
        shared = client.scatter(function, broadcast=True) if threads else None

        def call(packed: PackedCase) -> Outcome:
            outcome: Outcome = client.submit(run_packed, shared, packed, pure=False).result()
            return outcome

        yield Connection(call, len(threads))


def _not_installed(kind: str) -> InputError:
    return InputError(
        f"the packages of {kind} are not installed",
        where="--cluster",
        fix=f"pip install 'prfaas[{kind}]'",
    )


def _unusable(kind: str, address: str, why: str, fix: str | None = None) -> InputError:
    first = why.strip().partition("\n")[0]
    return InputError(
        f"the {kind} cluster at {address} cannot be used: {first}",
        where="--cluster",
        fix=fix or "check that the cluster runs and that its address is right",
    )

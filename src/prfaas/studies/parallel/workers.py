"""Where the cases of a study run: in this process, in local processes, or on a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from prfaas.errors import InputError


class ClusterAddress(NamedTuple):
    """A cluster that exists already. `address` is what its own client expects."""

    kind: Literal["ray", "dask"]
    address: str


@dataclass(frozen=True, slots=True)
class Workers:
    """`count` is the number of cases that run at the same time; None stands for all cores that
    this process may use or, with a cluster, for all cores of the cluster."""

    count: int | None = None
    cluster: ClusterAddress | None = None

    def local_count(self) -> int:
        if self.count is not None:
            return self.count
        # The import is here because commands that have one case do without joblib, which is slow
        # to import. joblib counts what affinity and cgroups leave to this process.
        import joblib

        return int(joblib.cpu_count())


HERE = Workers(count=1)


def parse_cluster(text: str) -> ClusterAddress:
    """Reads the argument of `--cluster`:

    ray:auto, ray:HOST:PORT    from a machine of the Ray cluster
    ray://HOST:PORT            through a Ray client server
    dask://HOST:PORT           a Dask scheduler (dask:tls://HOST:PORT: with Dask's TLS settings)
    """
    kind, _, rest = text.partition(":")
    host = rest.removeprefix("//")
    if kind == "ray" and host:
        return ClusterAddress("ray", text if rest.startswith("//") else rest)
    if kind == "dask" and host:
        return ClusterAddress("dask", f"tcp:{rest}" if rest.startswith("//") else rest)
    raise InputError(
        f"{text!r} is not the address of a Ray or Dask cluster",
        where="--cluster",
        fix="give ray:auto, ray:HOST:PORT, ray://HOST:PORT or dask://HOST:PORT",
    )

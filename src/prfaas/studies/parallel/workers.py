"""Where the cases of a study run: in this process, in local processes, or on a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.errors import InputError


@dataclass(frozen=True, slots=True)
class Workers:
    """`count` is the number of cases that run at the same time; None stands for all cores that
    this process may use or, with a cluster, for all cores of the cluster. `cluster` is the address
    of a Ray cluster that exists already, as Ray's own client expects it."""

    count: int | None = None
    cluster: str | None = None

    def local_count(self) -> int:
        if self.count is not None:
            return self.count
        # The import is here because commands that have one case do without joblib, which is slow
        # to import. joblib counts what affinity and cgroups leave to this process.
        import joblib

        return int(joblib.cpu_count())


HERE = Workers(count=1)


def parse_cluster(text: str) -> str:
    """Reads the argument of `--cluster`:

    ray:auto, ray:HOST:PORT    from a machine of the Ray cluster
    ray://HOST:PORT            through a Ray client server
    """
    kind, _, rest = text.partition(":")
    if kind == "ray" and rest.removeprefix("//"):
        return text if rest.startswith("//") else rest
    raise InputError(
        f"{text!r} is not the address of a Ray cluster",
        where="--cluster",
        fix="give ray:auto, ray:HOST:PORT or ray://HOST:PORT",
    )

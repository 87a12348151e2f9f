"""The answers from which `prfaas init` makes a deployment. Pure.

They are kept beside the deployment's files, without its secrets, so that hosts can be added.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from prfaas.config.address import Address
from prfaas.config.fields import Count, Port
from prfaas.config.host import KvdSection, NodeSection
from prfaas.errors import InputError
from prfaas.security.peers import is_host_name

EngineName: TypeAlias = Literal["hf", "emulated", "vllm"]
ClusterKind: TypeAlias = Literal["prfaas", "pd"]


class Hardware(msgspec.Struct, frozen=True):
    """One instance of a cluster: its accelerator, as the catalog names it, and its GPUs."""

    accelerator: str
    gpus: Count


class ClusterHosts(msgspec.Struct, frozen=True):
    """A cluster and its hosts. A host that is listed n times has n instances."""

    name: str
    kind: ClusterKind
    hosts: list[str]
    hardware: Hardware | None = None  # None: not chosen yet


class Ports(msgspec.Struct, frozen=True):
    """The ports of a host's first instance. The next instance of the same host has the next ports:
    two for its kvd, one for its node."""

    kvd_data: Port = 7400
    kvd_http: Port = 7401
    node: Port = 8000
    gateway: Port = 8080


class Instance(msgspec.Struct, frozen=True):
    """An engine and its kvd."""

    name: str  # of the kvd at gateways
    cluster: str
    host: str
    nth: int  # among the instances of its host

    @property
    def suffix(self) -> str:
        """Distinguishes the files of the instances of one host."""
        return "" if self.nth == 0 else f"-{self.nth + 1}"


def place_instances(clusters: Sequence[ClusterHosts]) -> list[Instance]:
    per_host: Counter[str] = Counter()
    found = []
    for cluster in clusters:
        for number, host in enumerate(cluster.hosts):
            found.append(Instance(f"{cluster.name}-{number}", cluster.name, host, per_host[host]))
            per_host[host] += 1
    return found


class Answers(msgspec.Struct, frozen=True):
    clusters: list[ClusterHosts]
    instances: list[Instance]
    gateway: str  # the host that runs it
    engine: EngineName
    model: str  # the checkpoint's folder on every host; emulated: a model of the catalog
    name: str  # of the model in requests
    tenants: list[str]
    catalogs: list[str] = []  # file names of catalogs, in the gateway's folder
    memory: str = KvdSection().memory
    block_tokens: Count = NodeSection().block_tokens
    ports: Ports = Ports()
    all_addresses: bool = False  # services listen on all addresses of their host
    days: Count = 365  # validity of the hosts' certificates

    @property
    def hosts(self) -> list[str]:
        """Each host once, the gateway's included."""
        return list(dict.fromkeys([*(one.host for one in self.instances), self.gateway]))

    def cluster(self, name: str) -> ClusterHosts:
        return next(cluster for cluster in self.clusters if cluster.name == name)

    # Addresses --------------------------------------------------------------------------------

    def data_address(self, instance: Instance) -> Address:
        return Address(instance.host, self.ports.kvd_data + 2 * instance.nth)

    def kvd_address(self, instance: Instance) -> Address:
        return Address(instance.host, self.ports.kvd_http + 2 * instance.nth)

    def node_address(self, instance: Instance) -> Address:
        return Address(instance.host, self.ports.node + instance.nth)

    @property
    def gateway_url(self) -> str:
        return f"https://{Address(self.gateway, self.ports.gateway)}"

    def listen_host(self, host: str) -> str:
        """The address that the services of a host listen on. A name may resolve to another address
        on its own host, so services of a named host listen on all addresses."""
        if host == "localhost":
            return "127.0.0.1"
        if not _is_address(host):
            return "0.0.0.0"
        if self.all_addresses:
            return "::" if ":" in host else "0.0.0.0"
        return host

    def check(self) -> None:
        """Raises InputError when two services of a host would have the same port, or two hosts the
        same folder."""
        for name, count in Counter(folder_name(host) for host in self.hosts).items():
            if count > 1:
                raise InputError(
                    f"the name {name!r} is that of two hosts' folders",
                    where="--pd, --prfaas, --gateway",
                    fix="give one of the hosts another name",
                )
        used: dict[Address, str] = {Address(self.gateway, self.ports.gateway): "--gateway-port"}
        for instance in self.instances:
            for address, flag in (
                (self.data_address(instance), "--kvd-port"),
                (self.kvd_address(instance), "--kvd-http-port"),
                (self.node_address(instance), "--node-port"),
            ):
                if address in used or address.port > 65535:
                    raise InputError(
                        f"{address} of {instance.name} is not free",
                        where=flag,
                        fix=f"choose another port; {used.get(address, 'no service')} uses this one"
                        if address in used
                        else "choose a lower port",
                    )
                used[address] = flag


def with_host(answers: Answers, cluster: str, host: str) -> tuple[Answers, Instance]:
    """The answers with one more instance, and that instance. Raises InputError."""
    names = [one.name for one in answers.clusters]
    if cluster not in names:
        raise InputError(
            f"the deployment has no cluster {cluster!r}",
            where="--add-host",
            fix=f"clusters are: {', '.join(names)}",
        )
    number = sum(one.cluster == cluster for one in answers.instances)
    nth = sum(one.host == host for one in answers.instances)
    added = Instance(f"{cluster}-{number}", cluster, host, nth)
    made = msgspec.structs.replace(answers, instances=[*answers.instances, added])
    made.check()
    return made, added


# Reading answers ----------------------------------------------------------------------------------


def parse_host(text: str, where: str) -> str:
    """A host name, or an address in its shortest form without brackets. Raises InputError."""
    bare = text.strip()
    if bare.startswith("[") and bare.endswith("]"):
        bare = bare[1:-1]
    problem = InputError(
        f"{text!r} is not a host",
        where=where,
        fix="give names or addresses such as gw.example.net, 10.0.0.1 or fd00::1, without ports",
    )
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        # A name whose last label is a number is a mistyped address.
        if not is_host_name(bare) or bare.rstrip(".").rpartition(".")[2].isdigit():
            raise problem from None
        return bare.lower()
    if address.is_unspecified or address.is_multicast or "%" in bare:
        raise problem
    return str(address)


def parse_hosts(text: str, where: str) -> list[str]:
    """Hosts with commas between them; none for an empty text."""
    return [parse_host(part, where) for part in text.split(",") if part.strip()]


def parse_cluster(text: str, kind: ClusterKind) -> ClusterHosts:
    """`NAME=HOST,HOST`, or only the hosts of a cluster with the name of its kind."""
    where = f"--{kind}"
    name, equals, hosts_text = text.rpartition("=")
    name = name.strip() if equals else kind
    if not _is_name(name):
        raise InputError(
            f"{name!r} is not a cluster's name",
            where=where,
            fix="write NAME=HOST,HOST with letters, digits, - and _ in the name",
        )
    hosts = parse_hosts(hosts_text, where)
    if not hosts:
        raise InputError(f"cluster {name!r} has no host", where=where, fix="write NAME=HOST,HOST")
    return ClusterHosts(name, kind, hosts)


def parse_per_cluster(
    values: Sequence[str], clusters: Sequence[ClusterHosts], where: str
) -> dict[str, str]:
    """Values of an option by cluster: `VALUE` is for every cluster, `CLUSTER=VALUE` for one."""
    names = [cluster.name for cluster in clusters]
    found: dict[str, str] = {}
    for value in sorted(values, key=lambda text: "=" in text):  # those for every cluster first
        name, equals, rest = value.partition("=")
        if not equals:
            found.update(dict.fromkeys(names, value))
        elif name in names:
            found[name] = rest
        else:
            raise InputError(
                f"no cluster is named {name!r}",
                where=where,
                fix=f"clusters are: {', '.join(names)}",
            )
    return found


def check_clusters(clusters: Sequence[ClusterHosts]) -> None:
    """Raises InputError unless there is one PD cluster and every name is unique."""
    local = [cluster for cluster in clusters if cluster.kind == "pd"]
    if len(local) != 1:
        raise InputError(
            f"{len(local)} PD clusters are given",
            where="--pd",
            fix="give one, such as --pd pd=10.0.0.1,10.0.0.2",
        )
    for name, count in Counter(cluster.name for cluster in clusters).items():
        if count > 1:
            raise InputError(
                f"{count} clusters are named {name!r}", where="--prfaas", fix="use other names"
            )


def check_tenants(tenants: Sequence[str]) -> None:
    for name in tenants:
        if not _is_name(name) or tenants.count(name) > 1:
            raise InputError(
                f"{name!r} is not a tenant's name, or is given twice",
                where="--tenant",
                fix="use letters, digits, - and _",
            )


def folder_name(host: str) -> str:
    """The folder of a host. A colon would end a host name for `scp`."""
    return host.replace(":", "-")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_name(text: str) -> bool:
    return (
        0 < len(text) <= 64
        and text.isascii()
        and all(c.isalnum() or c in "-_" for c in text)
        and not text.startswith("-")
    )

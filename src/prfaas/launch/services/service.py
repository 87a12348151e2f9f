"""One service of a deployment: what has to be known to run it. Pure."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

ServiceKind: TypeAlias = Literal["kvd", "engine", "relay", "gateway"]


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """A process. Whether it runs by itself or in a container is not decided here."""

    name: str
    kind: ServiceKind
    cluster: str
    host: str  # services of one host share its socket, and a pod
    program: str = "prfaas"
    words: tuple[str, ...]  # of the command line, after the program
    ports: dict[str, int] = {}  # by name; 0: the system chooses one
    files: dict[str, str] = {}  # configuration files with their text, by name
    secrets: tuple[str, ...] = ()  # names of the files with its keys and certificates
    environment: dict[str, str] = {}
    probe_port: str = ""  # the name of the port at which the two paths are asked for
    live_path: str = ""
    ready_path: str = ""
    after: tuple[str, ...] = ()  # names of the services that must be ready before it starts
    leave_s: float = 0.0  # after SIGTERM it serves on for so long
    drain_s: float = 0.0  # and then finishes what it has begun

    @property
    def stop_s(self) -> float:
        """The longest time that it takes from SIGTERM to its end, apart from closing."""
        return self.leave_s + self.drain_s

"""Network namespaces for tests that need real packets. Linux, root.

This module wraps `ip`, `setns` and device features. `lossy_net` builds a network from them.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prfaas.errors import PrfaasError

COMMAND_TIMEOUT_S = 20.0
_NAMES = Path("/run/netns")  # where `ip netns` keeps them
_CLONE_NEWNET = 0x40000000
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21
_SIOCETHTOOL = 0x8946
# ethtool's "set" commands: segmentation before and coalescing after the device.
FEATURES = {"tso": 0x1F, "gso": 0x24, "gro": 0x2C}


class NetworkError(PrfaasError):
    """The kernel or a tool refused a part of the test network."""


def why_not() -> str | None:
    """Returns why this process cannot make test networks, as one line; None when it can."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return "real packets need Linux (network namespaces)"
    if os.geteuid() != 0:
        return "real packets need root (network namespaces): run the tests as root"
    effective = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    capabilities = int(effective.split()[1], 16)
    if any(not capabilities >> bit & 1 for bit in (_CAP_NET_ADMIN, _CAP_SYS_ADMIN)):
        return "real packets need CAP_NET_ADMIN and CAP_SYS_ADMIN (a privileged container)"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"real packets need {' and '.join(missing)}: install the package iproute2"
    if not Path("/dev/net/tun").exists():
        return "real packets need /dev/net/tun: load the module tun, or map it into the container"
    return None


def command(*arguments: str) -> str:
    """Runs a tool and returns its output. Raises NetworkError with the tool's error output."""
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        output = " ".join((done.stderr or done.stdout).split())
        raise NetworkError(f"{' '.join(arguments)}: {output}")
    return done.stdout


def add_namespace(name: str) -> None:
    command("ip", "netns", "add", name)
    command("ip", "-n", name, "link", "set", "lo", "up")


def remove_namespace(name: str) -> None:
    """Removes a namespace and its devices. Does nothing when it does not exist."""
    if (_NAMES / name).exists():
        command("ip", "netns", "del", name)


def remove_leftovers(prefix: str) -> None:
    """Removes namespaces named `prefix-PID-...` whose process has been killed."""
    if not _NAMES.is_dir():
        return
    for name in os.listdir(_NAMES):
        parts = name.split("-")
        if parts[0] == prefix and len(parts) > 2 and not Path(f"/proc/{parts[1]}").exists():
            remove_namespace(name)


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Runs this thread in the namespace until the context ends. Sockets, threads and processes
    that it makes there stay in the namespace."""
    outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        enter(name)
        try:
            yield
        finally:
            _setns(outside)
    finally:
        os.close(outside)


def enter(name: str) -> None:
    """Moves this thread into the namespace."""
    descriptor = os.open(_NAMES / name, os.O_RDONLY)
    try:
        _setns(descriptor)
    finally:
        os.close(descriptor)


def _setns(descriptor: int) -> None:
    # os.setns comes with Python 3.12.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise NetworkError(f"setns: {os.strerror(ctypes.get_errno())}")


def set_features(namespace: str, device: str, **wanted: bool) -> None:
    """Turns the features of FEATURES on or off, as `ethtool -K` does."""
    with inside(namespace), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for feature, on in wanted.items():
            value = array.array("I", [FEATURES[feature], int(on)])
            request = struct.pack("16sP16x", device.encode(), value.buffer_info()[0])
            try:
                fcntl.ioctl(sock, _SIOCETHTOOL, request)
            except OSError as error:
                raise NetworkError(f"{device}: {feature}: {error.strerror}") from None


def set_device_value(namespace: str, device: str, name: str, value: int) -> None:
    # `ip netns exec` mounts a /sys for the namespace.
    script = f"echo {value} > /sys/class/net/{device}/{name}"
    command("ip", "netns", "exec", namespace, "sh", "-c", script)


def set_forwarding(namespace: str) -> None:
    """Makes the namespace a router."""
    with inside(namespace):
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1", encoding="ascii")

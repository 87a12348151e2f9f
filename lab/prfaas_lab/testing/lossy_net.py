"""Two hosts with a WAN of real packets between them: loss, rate and delay. Linux, root.

    near ──veth── wan ──veth── far                     without delay
    near ──veth── wan ──veth── edge ══tun══ far        with delay (the forwarder is the ══)

Each name is a namespace. Packets cross the first hop one by one (1,500 bytes, no offload). `wan`
drops some of them at random on arrival and queues the others before its bottleneck, a token bucket
with a bounded queue. `edge` acts as the receiving network card: it coalesces the remaining packets,
so that a Python process can delay them at 1 Gbit/s.

    with LossyNet(rate_bps=1e9, rtt_s=0.06, loss=0.001) as net:
        with net.inside_far():
            listener = socket.create_server((net.far_address, 0))
        with net.inside_near():
            client = socket.create_connection(listener.getsockname())
        net.set_loss(0.01)
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import IO

from prfaas.interpreter import module_command
from prfaas_lab.testing.netns import (
    COMMAND_TIMEOUT_S,
    NetworkError,
    add_namespace,
    command,
    inside,
    remove_leftovers,
    remove_namespace,
    set_device_value,
    set_features,
    set_forwarding,
    why_not,
)

_PREFIX = "prfaas"
_MTU_BYTES = 1500
# The bucket must hold the bytes that pass between two wake-ups of the kernel's timer.
_LEAST_BURST_BYTES, _BURST_S = 64 * 1024, 1e-3
_LEAST_QUEUE_BYTES = 64 * 1024
# How long the edge waits for more packets to coalesce. With a shorter time the forwarder gets
# single packets; a longer time adds to the delay.
_COALESCE_NS = 300_000
_TUN_QUEUE_PACKETS = 20_000
_numbers = itertools.count()


class LossyNet:
    """`near` and `far` are namespace names. The end of the context removes everything.

    `rate_bps` limits each direction, with a queue of `queue_s` at that rate; `loss` is the share
    of packets lost from near to far. A network without `rtt_s` cannot get a delay later.
    """

    near_address = "10.213.1.1"

    def __init__(
        self,
        *,
        rate_bps: float | None = None,
        rtt_s: float = 0.0,
        loss: float = 0.0,
        queue_s: float = 0.1,
    ) -> None:
        base = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self.near, self.far = f"{base}-near", f"{base}-far"
        self._wan, self._edge = f"{base}-wan", f"{base}-edge"
        self._delayed = rtt_s > 0
        self.far_address = "10.213.3.2" if self._delayed else "10.213.2.2"
        self._rate_bps, self._rtt_s, self._loss, self._queue_s = rate_bps, rtt_s, loss, queue_s
        self._stack = ExitStack()
        self._forwarder: subprocess.Popen[str] | None = None

    def __enter__(self) -> LossyNet:
        if reason := why_not():
            raise NetworkError(reason)
        remove_leftovers(_PREFIX)
        with ExitStack() as stack:
            self._build(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    # Conditions ------------------------------------------------------------------------------

    def set_loss(self, to_far: float, to_near: float = 0.0) -> None:
        """Sets the share of packets lost in each direction from now on."""
        for device, share in (("near0", to_far), ("far0", to_near)):
            command(*_tc(self._wan, "filter", "replace", device), *_drop_filter(share))

    def set_rate(self, rate_bps: float) -> None:
        """Sets the rate of each direction from now on. Queued packets are lost."""
        burst = max(_LEAST_BURST_BYTES, int(rate_bps / 8 * _BURST_S))
        queue = max(_LEAST_QUEUE_BYTES, int(rate_bps / 8 * self._queue_s))
        for device in ("near0", "far0"):
            limits = ["rate", f"{int(rate_bps)}bit", "burst", f"{burst}b", "limit", f"{queue}b"]
            command(*_tc(self._wan, "qdisc", "replace", device), "root", "tbf", *limits)

    def set_rtt(self, rtt_s: float) -> None:
        """Sets the round trip from now on; packets in flight keep their delay."""
        if self._forwarder is None:
            raise NetworkError("this network was made without a delay: construct it with rtt_s")
        _pipe(self._forwarder.stdin).write(f"{rtt_s / 2}\n")
        _pipe(self._forwarder.stdin).flush()

    def lost_packets(self) -> int:
        """The number of packets that `set_loss` has dropped so far, from near to far."""
        shown = json.loads(
            command("tc", "-n", self._wan, "-s", "-j", "qdisc", "show", "dev", "near0")
        )
        return sum(int(q["drops"]) for q in shown if q["kind"] == "clsact")

    # Inside the namespaces -------------------------------------------------------------------

    def inside_near(self) -> AbstractContextManager[None]:
        """See `netns.inside`."""
        return inside(self.near)

    def inside_far(self) -> AbstractContextManager[None]:
        return inside(self.far)

    def near_command(self, *arguments: str) -> Sequence[str]:
        """The command line that runs `arguments` in near."""
        return ("ip", "netns", "exec", self.near, *arguments)

    def far_command(self, *arguments: str) -> Sequence[str]:
        return ("ip", "netns", "exec", self.far, *arguments)

    # Building --------------------------------------------------------------------------------

    def _build(self, stack: ExitStack) -> None:
        names = [self.near, self._wan, self.far] + ([self._edge] if self._delayed else [])
        for name in names:
            stack.callback(remove_namespace, name)
            add_namespace(name)
        _join(self.near, "wan0", self.near_address, self._wan, "near0", "10.213.1.2")
        if self._delayed:
            _join(self._wan, "far0", "10.213.2.1", self._edge, "wan0", "10.213.2.2")
            set_features(self._edge, "wan0", gro=True)
            set_device_value(self._edge, "wan0", "gro_flush_timeout", _COALESCE_NS)
            self._forwarder = stack.enter_context(self._start_forwarder())
            # Close its input before waiting for the process: the process then ends.
            stack.callback(_pipe(self._forwarder.stdin).close)
            _configure_tun(self._edge, "far0", "10.213.3.1")
            _configure_tun(self.far, "wan0", self.far_address)
            _route(self._wan, "10.213.3.0/24", "10.213.2.2")
            _route(self._edge, "10.213.1.0/24", "10.213.2.1")
            _route(self.far, "default", "10.213.3.1")
        else:
            _join(self._wan, "far0", "10.213.2.1", self.far, "wan0", self.far_address)
            _route(self.far, "default", "10.213.2.1")
        _route(self.near, "default", "10.213.1.2")
        for name in (self._wan, self._edge)[: 2 if self._delayed else 1]:
            set_forwarding(name)
        for device in ("near0", "far0"):
            command(*_tc(self._wan, "qdisc", "add", device), "clsact")
        self.set_loss(self._loss)
        if self._rate_bps is not None:
            self.set_rate(self._rate_bps)

    def _start_forwarder(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            module_command(
                "prfaas_lab.testing.lossy_forwarder",
                *(self._edge, "far0", self.far, "wan0", str(self._rtt_s / 2)),
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if _pipe(process.stdout).readline() != "ready\n":
            process.communicate(timeout=COMMAND_TIMEOUT_S)
            raise NetworkError("the forwarder did not start; its error output is above")
        return process


def _join(
    one: str, one_device: str, one_address: str, other: str, other_device: str, other_address: str
) -> None:
    """A cable between two namespaces, without segmentation offload."""
    ends = ((one, one_device, one_address), (other, other_device, other_address))
    peer = ["type", "veth", "peer", "name", other_device, "netns", other]
    command("ip", "link", "add", one_device, "netns", one, "mtu", str(_MTU_BYTES), *peer)
    for namespace, device, address in ends:
        set_features(namespace, device, tso=False, gso=False, gro=False)
        command("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", device)
        command("ip", "-n", namespace, "link", "set", device, "up")


def _configure_tun(namespace: str, device: str, address: str) -> None:
    queue = ["txqueuelen", str(_TUN_QUEUE_PACKETS), "mtu", str(_MTU_BYTES)]
    command("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", device)
    command("ip", "-n", namespace, "link", "set", device, "up", *queue)


def _route(namespace: str, destination: str, via: str) -> None:
    command("ip", "-n", namespace, "route", "add", destination, "via", via)


def _tc(namespace: str, what: str, action: str, device: str) -> tuple[str, ...]:
    return ("tc", "-n", namespace, what, action, "dev", device)


def _drop_filter(share: float) -> list[str]:
    """A classic BPF filter that drops this share of the arriving IPv4 packets:

    A = protocol; if A != IPv4 goto pass       (a lost ARP would stop everything for a second)
    A = random();  if A >= share x 2^32 goto pass
    drop:  return TC_ACT_SHOT
    pass:  return TC_ACT_OK
    """
    if not 0 <= share <= 1:
        raise NetworkError(f"the loss share is {share}; give 0 to 1")
    ancillary, protocol, random_number = 2**32 - 0x1000, 0, 56  # SKF_AD_OFF and fields beyond it
    threshold = min(2**32 - 1, int(share * 2**32))
    program = [
        f"32 0 0 {ancillary + protocol}",
        "21 0 3 2048",
        f"32 0 0 {ancillary + random_number}",
        f"53 1 0 {threshold}",
        "6 0 0 2",
        "6 0 0 0",
    ]
    bytecode = f"{len(program)},{','.join(program)}"
    place = ["ingress", "pref", "1", "handle", "1", "protocol", "all"]
    return [*place, "bpf", "direct-action", "bytecode", bytecode]


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe

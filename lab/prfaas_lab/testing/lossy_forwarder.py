"""A process that delays packets between two namespaces, with a TUN device in each of them.

    python -m prfaas_lab.testing.lossy_forwarder NAMESPACE DEVICE NAMESPACE DEVICE DELAY_S

It prints "ready" when both devices exist. Each line on standard input is a new delay in seconds.
The process ends when its standard input ends, so it never outlives its parent. Packets have the
kernel's offload header, so that one read carries up to 64 KiB of a connection where the kernel has
coalesced it; one packet of 1,500 bytes per read would occupy a core at 1 Gbit/s.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field

from prfaas_lab.testing.netns import inside

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOAD_CHECKSUM_AND_TCP = 0x01 | 0x02 | 0x04 | 0x08  # CSUM, TSO4, TSO6, TSO_ECN
_LARGEST_READ_BYTES = 64 * 1024 + 256
_BATCH = 64  # reads before the next look at the clock
# Bytes in flight per direction: 10 Gbit/s for 50 ms. More are dropped, as a full queue does.
_MAX_HELD_BYTES = 64 * 1024 * 1024
_LONGEST_WAIT_S = 1.0


@dataclass(slots=True)
class PacketDirection:
    """One direction, with its delayed packets."""

    source: int
    target: int
    packets: deque[tuple[float, bytes]] = field(default_factory=deque)
    held_bytes: int = 0

    def read_packets(self, leaves_at_s: float) -> None:
        for _ in range(_BATCH):
            try:
                packet = os.read(self.source, _LARGEST_READ_BYTES)
            except BlockingIOError:
                return
            if self.held_bytes + len(packet) <= _MAX_HELD_BYTES:
                self.packets.append((leaves_at_s, packet))
                self.held_bytes += len(packet)

    def write_due(self, now_s: float) -> float:
        """Writes the due packets. Returns the time until the next one is due."""
        packets = self.packets
        while packets and packets[0][0] <= now_s:
            packet = packets.popleft()[1]
            self.held_bytes -= len(packet)
            try:
                os.write(self.target, packet)
            except OSError:
                pass  # the device is down or out of memory: the packet is lost, as on a real path
        return packets[0][0] - now_s if packets else _LONGEST_WAIT_S


def open_tun(namespace: str, device: str) -> int:
    """Makes a TUN device in the namespace. It exists until the returned descriptor is closed."""
    with inside(namespace):
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", device.encode(), flags))
        fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _OFFLOAD_CHECKSUM_AND_TCP)
    return descriptor


def forward(one: int, other: int, commands: int, delay_s: float) -> None:
    """Forwards until the input `commands` ends."""
    directions = {one: PacketDirection(one, other), other: PacketDirection(other, one)}
    poll = select.epoll()
    for descriptor in (one, other, commands):
        poll.register(descriptor, select.EPOLLIN)
    while True:
        now_s = time.monotonic()
        wait_s = min(direction.write_due(now_s) for direction in directions.values())
        for descriptor, _ in poll.poll(max(0.0, wait_s)):
            if descriptor == commands:
                text = os.read(commands, 4096)
                if not text:
                    return
                delay_s = float(text.split()[-1])
            else:
                directions[descriptor].read_packets(time.monotonic() + delay_s)


def main(arguments: list[str]) -> None:
    one_namespace, one_device, other_namespace, other_device, delay_s = arguments
    one = open_tun(one_namespace, one_device)
    other = open_tun(other_namespace, other_device)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    forward(one, other, sys.stdin.fileno(), float(delay_s))


if __name__ == "__main__":
    main(sys.argv[1:])

"""KV across a long link: utilisation, and the overlap of a transfer with its prefill.

    python -m prfaas_lab bench wan [--gbps 1] [--rtt-ms 60] [--lossy]

`utilisation`: goodput over the link's rate for 1, 2, 4 and 8 connections through the user-space
relay (`prfaas wan`), once the pipe is full. `overlap`: segments become ready evenly over T seconds
while the link is twice as fast as needed. The result is the wait after the last segment is ready,
beside the wait when the whole transfer starts then. `--lossy` (requires root): real packets with
0.1% loss between two network namespaces, BBR and cubic, one and eight connections.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from typing import Any

from prfaas.config.address import Address
from prfaas.transport.grants import new_grant
from prfaas.transport.link import LinkOptions, TransferLink
from prfaas.transport.listener import Listener
from prfaas.transport.messages import Manifest
from prfaas.wan.path import Conditions
from prfaas.wan.relay import Relay
from prfaas_lab.testing.lossy_net import LossyNet

SEGMENT_BYTES = 2_359_296  # one MLA layer of the 1T model for 2,048 tokens
TIMEOUT_S = 120.0


class Memory:
    def __init__(self, nbytes: int) -> None:
        self._view = memoryview(bytearray(nbytes))

    def buffers(self, manifest: Manifest) -> list[list[memoryview]]:
        at, found = 0, []
        for segment in manifest.segments:
            found.append([self._view[at : at + segment.nbytes]])
            at += segment.nbytes
        return found

    def committed(self) -> None: ...

    def ended(self, reason: str) -> None: ...


def relayed(listener: Listener, gbps: float, rtt_ms: float) -> Relay:
    conditions = Conditions(rate_bps=gbps * 1e9, rtt_s=rtt_ms / 1e3)
    return Relay(Address("127.0.0.1", 0), Address(*listener.address), conditions)


def utilisation(gbps: float, rtt_ms: float, options: LinkOptions) -> float:
    """Used share of the link in a transfer of about 4 s, after one that opened the windows."""
    with ExitStack() as stack:
        listener = stack.enter_context(Listener())
        relay = stack.enter_context(relayed(listener, gbps, rtt_ms))
        link = stack.enter_context(TransferLink(relay.address, options=options))
        transfer(link, listener, int(gbps * 1e9 / 8))
        nbytes = int(4 * gbps * 1e9 / 8)
        took_s = transfer(link, listener, nbytes)
        return nbytes * 8 / (took_s - rtt_ms / 1e3) / (gbps * 1e9)


def lossy_utilisation(gbps: float, rtt_ms: float, loss: float, options: LinkOptions) -> float:
    """Used share of a link with real packets of 1,500 bytes and packet loss."""
    with ExitStack() as stack:
        net = stack.enter_context(LossyNet(rate_bps=gbps * 1e9, rtt_s=rtt_ms / 1e3, loss=loss))
        with net.inside_far():
            listener = stack.enter_context(Listener(net.far_address))
        with net.inside_near():
            link = stack.enter_context(TransferLink(listener.address, options=options))
            return goodput_bps(link, listener, int(10 * gbps * 1e9 / 8)) / (gbps * 1e9)


def goodput_bps(link: TransferLink, listener: Listener, nbytes: int) -> float:
    """The acknowledged rate during 4 s, after 3 s of warm-up. A slow link may not finish."""
    count = nbytes // SEGMENT_BYTES
    grant = new_grant("bench", max_bytes=count * SEGMENT_BYTES, deadline_s=30)
    listener.expect(grant, Memory(count * SEGMENT_BYTES))
    content = memoryview(bytes(SEGMENT_BYTES))
    sending = link.open(grant, {f"s{i}": SEGMENT_BYTES for i in range(count)})
    sending.ready_all({f"s{i}": [content] for i in range(count)})
    time.sleep(3)
    link.stats()
    time.sleep(4)
    found = link.stats().goodput_bps
    sending.abort("measured")
    return found


def transfer(link: TransferLink, listener: Listener, nbytes: int) -> float:
    """Returns seconds from the first ready byte until the sender knows of the commit."""
    count = max(1, nbytes // SEGMENT_BYTES)
    grant = new_grant("bench", max_bytes=count * SEGMENT_BYTES, deadline_s=30)
    listener.expect(grant, Memory(count * SEGMENT_BYTES))
    content = memoryview(bytes(SEGMENT_BYTES))
    sending = link.open(grant, {f"s{i}": SEGMENT_BYTES for i in range(count)})
    started = time.perf_counter()
    sending.ready_all({f"s{i}": [content] for i in range(count)})
    sending.done.result(TIMEOUT_S)
    return time.perf_counter() - started


def overlap(gbps: float, rtt_ms: float, seconds: float) -> dict[str, float]:
    """Compares segments that become ready evenly over `seconds` with all ready at the end. Their
    bytes are half the link's capacity in that time."""
    count = max(4, int(gbps / 2 * 1e9 / 8 * seconds / SEGMENT_BYTES))
    nbytes = count * SEGMENT_BYTES
    content = memoryview(bytes(SEGMENT_BYTES))
    exposed = {}
    for name in ("layer_wise", "at_the_end"):
        with ExitStack() as stack:
            listener = stack.enter_context(Listener())
            relay = stack.enter_context(relayed(listener, gbps, rtt_ms))
            link = stack.enter_context(
                TransferLink(relay.address, options=LinkOptions(connections=8))
            )
            transfer(link, listener, int(gbps * 1e9 / 8))
            grant = new_grant("bench", max_bytes=nbytes, deadline_s=30)
            listener.expect(grant, Memory(nbytes))
            sending = link.open(grant, {f"s{i}": SEGMENT_BYTES for i in range(count)})
            started = time.perf_counter()
            for index in range(count):
                wait_s = started + (index + 1) * seconds / count - time.perf_counter()
                time.sleep(max(0.0, wait_s))
                if name == "layer_wise":
                    sending.ready(f"s{index}", content)
            last_ready = time.perf_counter()
            if name == "at_the_end":
                sending.ready_all({f"s{i}": [content] for i in range(count)})
            sending.done.result(TIMEOUT_S)
            exposed[name] = time.perf_counter() - last_ready
    beyond_rtt = exposed["layer_wise"] - rtt_ms / 1e3
    return {
        "prefill_s": seconds,
        "transfer_s_alone": round(nbytes * 8 / (gbps * 1e9), 3),
        "exposed_s_layer_wise": round(exposed["layer_wise"], 3),
        "exposed_s_at_the_end": round(exposed["at_the_end"], 3),
        "exposed_beyond_rtt_over_prefill": round(beyond_rtt / seconds, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gbps", type=float, default=1.0, help="Rate of the link (default 1).")
    parser.add_argument(
        "--rtt-ms", type=float, default=60.0, help="Round trip of the link (default 60)."
    )
    parser.add_argument("--lossy", action="store_true", help="Use real packet loss; requires root.")
    parser.add_argument("--loss", type=float, default=0.001, help="Share of packets lost.")
    arguments = parser.parse_args()
    gbps, rtt_ms = arguments.gbps, arguments.rtt_ms
    report: dict[str, Any] = {"gbps": gbps, "rtt_ms": rtt_ms, "utilisation": {}}
    for connections in (1, 2, 4, 8):
        options = LinkOptions(connections=connections)
        share = utilisation(gbps, rtt_ms, options)
        report["utilisation"][str(connections)] = round(share, 3)
    report["overlap"] = overlap(gbps, rtt_ms, 3.0)
    if arguments.lossy:
        report["loss"] = arguments.loss
        report["utilisation_with_loss"] = {}
        for control in ("bbr", "cubic"):
            for connections in (8, 1):
                # With small frames, a report's count is close to the bytes that have arrived.
                options = LinkOptions(
                    connections=connections,
                    congestion_control=control,
                    frame_bytes=256 << 10,
                    quantum_bytes=256 << 10,
                )
                share = lossy_utilisation(gbps, rtt_ms, arguments.loss, options)
                name = f"{control}_{connections}"
                report["utilisation_with_loss"][name] = round(share, 3)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()

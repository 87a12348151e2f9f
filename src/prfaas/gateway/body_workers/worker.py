"""The program of a body worker: reads one body after the other, until the gateway's end of its
socket closes. The gateway starts it; its only argument is the socket's descriptor.

Nothing here is shared with the gateway or with another worker, so a body that takes all memory, all
time or the whole process costs its own request only.
"""

from __future__ import annotations

import gc
import logging
import math
import mmap
import os
import resource
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

import msgspec

from prfaas.errors import InputError, RequestError
from prfaas.gateway.api.content_encoding import TooManyBytes, decompress, too_large
from prfaas.gateway.api.request_preparation import RequestPreparer
from prfaas.gateway.body_workers.messages import (
    OUT_OF_MEMORY,
    PACKET_BYTES,
    Job,
    Prepared,
    Ready,
    Refused,
    Reply,
    WorkerSettings,
    pack,
)
from prfaas.service.logging import LogFormat, as_format, configure_logging
from prfaas.text import load_tokenizer

_LOG = logging.getLogger(__name__)
_NICE = 5  # streams come first
_LONG_BYTES = 1 << 20  # after such a body, garbage is collected at once
_TRACEBACK_CHARS = 4000
_JOB = msgspec.json.Decoder(Job)


def main(descriptor: int, log_format: LogFormat) -> None:
    configure_logging("warning", log_format)
    # A signal to the whole process group, such as Ctrl-C, is for the gateway: it still drains.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as connection, suppress(ConnectionError):
        packet = connection.recv(PACKET_BYTES)
        if not packet:
            return
        settings = msgspec.json.decode(packet, type=WorkerSettings)
        try:
            preparer = _start(settings)
        except InputError as error:
            _send(connection, Refused(str(error)))
            return
        _send(connection, Ready())
        _serve(connection, settings, preparer)


def _start(settings: WorkerSettings) -> RequestPreparer:
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would have prompts in it
    limit = settings.memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    folder = settings.tokenizer_folder
    tokenizer = load_tokenizer(Path(folder)) if folder is not None else None
    gc.collect()
    gc.freeze()
    return RequestPreparer(settings.model, settings.max_tokens, tokenizer)


def _serve(connection: socket.socket, settings: WorkerSettings, preparer: RequestPreparer) -> None:
    while True:
        packet, files, _, _ = socket.recv_fds(connection, PACKET_BYTES, 1)
        if not packet:
            return
        # The gateway ends a job that takes too long. The kernel does when there is no gateway.
        signal.alarm(math.ceil(2 * settings.job_s))
        (body,) = files
        nbytes = os.fstat(body).st_size
        result = os.memfd_create("prfaas-request", os.MFD_CLOEXEC)
        try:
            reply = _reply(_JOB.decode(packet), body, result, settings, preparer)
            _send(connection, reply, [] if isinstance(reply, Refused) else [result])
        finally:
            os.close(result)
            os.close(body)
        signal.alarm(0)
        if isinstance(reply, Refused) and reply.ends:
            return
        if nbytes > _LONG_BYTES:
            gc.collect()


def _reply(
    job: Job, body: int, result: int, settings: WorkerSettings, preparer: RequestPreparer
) -> Reply:
    began_s, read_bytes = time.process_time(), 0

    def count(nbytes: int) -> None:
        nonlocal read_bytes
        read_bytes += nbytes

    reply: Prepared | Refused
    try:
        data: memoryview | bytes = memoryview(mmap.mmap(body, 0, prot=mmap.PROT_READ))
        if job.encoding:
            data = decompress(data, job.encoding, settings.body_bytes, count)
        else:
            count(len(data))
        reply = pack(preparer.prepare(job.kind, data), result)
    except (InputError, RequestError) as error:
        reply = Refused.of(error)
    except TooManyBytes:
        reply = Refused.of(too_large(settings.body_bytes))
    except MemoryError:
        reply = OUT_OF_MEMORY
    except Exception:
        _LOG.error("%s", traceback.format_exc()[-_TRACEBACK_CHARS:])
        reply = Refused("internal gateway error", status=500, code="internal_error")
    cpu_s = time.process_time() - began_s
    return msgspec.structs.replace(reply, read_bytes=read_bytes, cpu_s=cpu_s)


def _send(connection: socket.socket, reply: Reply, files: list[int] | None = None) -> None:
    socket.send_fds(connection, [msgspec.json.encode(reply)], files or [])


if __name__ == "__main__":
    main(int(sys.argv[1]), as_format(sys.argv[2]))

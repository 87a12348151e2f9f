"""The log of a service, on standard error: lines for people, or one JSON object per line.

A process configures it where it begins: in the CLI, or in the main function of a worker process. A
module logs with `logging.getLogger(__name__)`, and adds fields for programs with
`extra=with_fields(...)`; the JSON format has them beside the message:

    {"time":"2026-11-18T07:06:12.345Z","level":"info","logger":"prfaas.gateway.fleet.fleet",
     "message":"pd-0 of pd joined at http://10.0.0.1:7080","event":"member","node":"pd-0",...}

Every line is bounded, whatever a peer or a client has sent. No thread of the service waits until a
line is written (`log_writer.py`).
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from prfaas.service.log_writer import LogWriter

LogFormat: TypeAlias = Literal["text", "json"]
FORMATS: tuple[LogFormat, ...] = ("text", "json")

_TEXT = "%(asctime)s %(name)s %(message)s"
MOST_MESSAGE = 4_096  # characters of a message, which may be a traceback, or of a text field
MOST_EXCEPTION = 16_384  # characters of a traceback, of which the end says most
FLUSH_S = 2.0  # for the last lines of a process
_FIELDS = "prfaas_fields"  # the attribute of a `LogRecord`
_MESSAGE = "prfaas_message"
_ENVELOPE = ("time", "level", "logger", "message", "exception")


def configure_logging(level: str, log_format: LogFormat = "text") -> None:
    """Logs messages of this level or above to standard error, and warnings of Python. An earlier
    configuration stays, as with `logging.basicConfig`. Call it after `limit_heap_growth`, because
    it starts a thread."""
    root = logging.getLogger()
    if not root.handlers:
        # A process that was started without standard error may have a socket in its place.
        root.addHandler(QueueingHandler(2) if sys.stderr else logging.NullHandler())
        root.setLevel(level.upper())
        logging.captureWarnings(True)
    for handler in root.handlers:
        if log_format == "json":
            handler.setFormatter(JsonFormatter())
        elif isinstance(handler, QueueingHandler):
            handler.setFormatter(logging.Formatter(_TEXT))


class QueueingHandler(logging.Handler):
    """Formats a record where it was logged, and leaves the line to a `LogWriter`."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._writer = LogWriter(descriptor, self._describe_loss)

    @property
    def dropped(self) -> int:
        return self._writer.dropped

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            # `Handler.handleError` would write to standard error, and wait for it.
            line = f"a line of {record.name} could not be formatted: {traceback.format_exc()}"
        self._writer.write(_encoded(line))

    def flush(self) -> None:
        """`logging` calls this at the end of the process."""
        self._writer.flush(FLUSH_S)

    def _describe_loss(self, lines: int) -> bytes:
        logger = logging.getLogger(__name__)
        record = logger.makeRecord(
            *(logger.name, logging.WARNING, "", 0, _LOSS, (lines,), None),
            extra=with_fields(event="log", dropped=lines),
        )
        return _encoded(self.format(record))


_LOSS = "%d lines of this log are missing here: standard error did not take them in time"


def _encoded(line: str) -> bytes:
    return f"{line}\n".encode("utf-8", "backslashreplace")


def flush_log() -> None:
    """Waits until the log is written, within a bound: for a process that ends by `os._exit`."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def dropped_lines() -> int:
    """How many lines of this process's log were not written."""
    handlers = logging.getLogger().handlers
    return sum(one.dropped for one in handlers if isinstance(one, QueueingHandler))


def configured_format() -> LogFormat:
    """The format of this process's log, which its worker processes are to use as well."""
    handlers = logging.getLogger().handlers
    return "json" if any(isinstance(one.formatter, JsonFormatter) for one in handlers) else "text"


def as_format(word: str) -> LogFormat:
    """The format that a parent process has named; text where it is an unknown word."""
    return "json" if word == "json" else "text"


def with_fields(message: str | None = None, /, **fields: Any) -> dict[str, Any]:
    """The argument `extra` of a log call: fields of the JSON format. `message` replaces the line's
    text there, for a line whose text consists of the fields."""
    extra: dict[str, Any] = {_FIELDS: fields}
    if message is not None:
        extra[_MESSAGE] = message
    return extra


class JsonFormatter(logging.Formatter):
    """One line of JSON for every record. The times are in UTC, as RFC 3339 writes them."""

    def format(self, record: logging.LogRecord) -> str:
        message = getattr(record, _MESSAGE, None) or record.getMessage()
        line: dict[str, Any] = {
            "time": _rfc_3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _shortened(message, MOST_MESSAGE),
        }
        fields: Mapping[str, Any] = getattr(record, _FIELDS, {})
        # A field never hides a part of the envelope.
        line |= {name: _plain(value) for name, value in fields.items() if name not in _ENVELOPE}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)[-MOST_EXCEPTION:]
        return encode_line(line)


def encode_line(fields: Mapping[str, Any]) -> str:
    """JSON without a line break. A text with half a surrogate pair, as headers with stray bytes
    have them, is written with an escape."""
    try:
        return msgspec.json.encode(fields, enc_hook=str).decode()
    except UnicodeEncodeError:
        return msgspec.json.encode(_encodable(fields), enc_hook=str).decode()


def _plain(value: Any) -> Any:
    return _shortened(value, MOST_MESSAGE) if isinstance(value, str) else value


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_encodable(name): _encodable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(one) for one in value]
    return value


def _rfc_3339(epoch_s: float) -> str:
    seconds, milliseconds = divmod(int(epoch_s * 1e3), 1_000)
    shown = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{shown}.{milliseconds:03d}Z"

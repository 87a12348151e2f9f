"""Copies between a device and pinned pages, many pages with one call.

The pages of a segment are often equally far apart: a kvd's block holds all layers, so one layer's
share of neighbouring blocks is a column of a matrix. CUDA copies such a matrix in one call
(cuMemcpy2DAsync), which torch does not offer. One call per page would take longer than the bytes.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

_LOG = logging.getLogger(__name__)
_HOST, _DEVICE = 1, 2  # CUmemorytype
_MOST_PITCH = (1 << 31) - 1


class PageGroup(NamedTuple):
    """`pages` pages of `nbytes` each, `pitch` apart."""

    address: int
    nbytes: int
    pages: int
    pitch: int


def page_groups(pages: Iterable[tuple[int, int]]) -> list[PageGroup]:
    """Pages (address, bytes) as few groups, in the same order."""
    groups: list[PageGroup] = []
    for address, nbytes in pages:
        if groups:
            last = groups[-1]
            pitch = address - (last.address + (last.pages - 1) * last.pitch)
            is_next = last.pages == 1 or pitch == last.pitch
            if is_next and nbytes == last.nbytes <= pitch <= _MOST_PITCH:
                groups[-1] = PageGroup(last.address, nbytes, last.pages + 1, pitch)
                continue
        groups.append(PageGroup(address, nbytes, 1, nbytes))
    return groups


def copy_pages(
    rows: torch.Tensor,
    pages: Sequence[memoryview],
    stream: torch.cuda.Stream | None,
    *,
    into_pages: bool,
) -> None:
    """Queues copies between flat `rows` (uint8, on the device) and the pages. The pages must be
    writable and, for a device, pinned. `stream` must be the current one; None for a CPU."""
    copy = None if stream is None else _copy_2d()
    if copy is None or stream is None:
        _copy_each(rows, pages, into_pages=into_pages)
        return
    addresses = [(ctypes.addressof(ctypes.c_char.from_buffer(page)), page.nbytes) for page in pages]
    at = rows.data_ptr()
    for group in page_groups(addresses):
        result = copy(_order(at, group, into_pages=into_pages), stream.cuda_stream)
        if result != 0:  # refused, so nothing of it has been copied
            _LOG.warning("CUDA refused a copy of %s with error %d", group, result)
            _copy_each(rows, pages, into_pages=into_pages)
            return
        at += group.nbytes * group.pages


def _copy_each(rows: torch.Tensor, pages: Sequence[memoryview], *, into_pages: bool) -> None:
    at = 0
    for page in pages:
        memory = torch.frombuffer(page, dtype=torch.uint8)
        piece = rows[at : at + len(memory)]
        if into_pages:
            memory.copy_(piece, non_blocking=True)
        else:
            piece.copy_(memory, non_blocking=True)
        at += len(memory)


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver's interface."""

    _fields_ = [
        ("srcXInBytes", ctypes.c_size_t),
        ("srcY", ctypes.c_size_t),
        ("srcMemoryType", ctypes.c_uint),
        ("srcHost", ctypes.c_void_p),
        ("srcDevice", ctypes.c_uint64),
        ("srcArray", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t),
        ("dstY", ctypes.c_size_t),
        ("dstMemoryType", ctypes.c_uint),
        ("dstHost", ctypes.c_void_p),
        ("dstDevice", ctypes.c_uint64),
        ("dstArray", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    ]


def _order(device_address: int, group: PageGroup, *, into_pages: bool) -> _Copy2D:
    order = _Copy2D(WidthInBytes=group.nbytes, Height=group.pages)
    if into_pages:
        order.srcMemoryType, order.srcDevice, order.srcPitch = _DEVICE, device_address, group.nbytes
        order.dstMemoryType, order.dstHost, order.dstPitch = _HOST, group.address, group.pitch
    else:
        order.srcMemoryType, order.srcHost, order.srcPitch = _HOST, group.address, group.pitch
        order.dstMemoryType, order.dstDevice, order.dstPitch = _DEVICE, device_address, group.nbytes
    return order


@functools.cache
def _copy_2d() -> Callable[[_Copy2D, int], int] | None:
    """The driver's function, or None where the driver does not have it."""
    try:
        function: Any = ctypes.CDLL("libcuda.so.1").cuMemcpy2DAsync_v2
    except (OSError, AttributeError) as error:
        _LOG.warning("pages are copied one by one: %s", error)
        return None
    function.argtypes = [ctypes.POINTER(_Copy2D), ctypes.c_void_p]
    function.restype = ctypes.c_int

    def copy(order: _Copy2D, stream: int) -> int:
        return int(function(ctypes.byref(order), stream))

    return copy

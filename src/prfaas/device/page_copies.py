"""Copies between rows on a device and pinned pages, many pages with one call.

One call per page takes longer than its bytes. Two calls of CUDA's driver, which torch does not
offer, copy many at the rate of the bus:

    cuMemcpy2DAsync      a matrix whose rows are equally far apart, even of a few hundred bytes: one
                         layer's share of neighbouring blocks, or a rank's heads of many rows
    cuMemcpyBatchAsync   pieces at any places; CUDA 13

A call cannot cross from one registration of memory into the next, so pieces are cut there.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from prfaas.device.page_pins import PinnedMapping, Places
from prfaas.device.row_pages import RowShape
from prfaas.errors import EngineError

_HOST, _DEVICE = 1, 2  # CUmemorytype
_MOST_PITCH = (1 << 31) - 1
_AT_ONCE = 128  # the device begins when a call returns
_FEW_ROWS = 4  # matrices with fewer rows than this on average are copied as pieces
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when their turn comes

Numbers: TypeAlias = npt.NDArray[np.int64]


class Matrix(NamedTuple):
    """`rows` rows of `width` bytes, on the host and on the device."""

    host: int  # address
    device: int
    width: int
    rows: int
    host_pitch: int
    device_pitch: int

    def cut(self, seam: int) -> tuple[Matrix, Matrix]:
        """The parts before and after, where a seam of the host's memory divides rows or bytes."""
        if self.rows > 1:
            ended = (seam - self.host - self.width) // self.host_pitch + 1  # before the seam
            rows = max(1, min(ended, self.rows - 1))
            return (
                self._replace(rows=rows),
                self._replace(
                    host=self.host + rows * self.host_pitch,
                    device=self.device + rows * self.device_pitch,
                    rows=self.rows - rows,
                ),
            )
        width = seam - self.host
        return (
            self._replace(width=width),
            self._replace(host=seam, device=self.device + width, width=self.width - width),
        )


def matrices(pages: Iterable[tuple[int, int]], device: int, shape: RowShape) -> list[Matrix] | None:
    """Pages (address, bytes) in the order of the rows on the device, as matrices of the rank's
    columns. None when a page ends inside a row."""
    found: list[Matrix] = []
    for address, nbytes in pages:
        rows, rest = divmod(nbytes, shape.row_bytes)
        if rest:
            return None
        for place, at in shape.columns:
            found.append(
                Matrix(
                    address + place.start,
                    device + at,
                    len(place),
                    rows,
                    shape.row_bytes,
                    shape.own_bytes,
                )
            )
        device += rows * shape.own_bytes
    return found


def cut_at_seams(found: Iterable[Matrix], next_seam: Callable[[int], int]) -> Iterator[Matrix]:
    """The same bytes, and no matrix crosses a seam. `next_seam`: the first seam behind an
    address."""
    for matrix in found:
        waiting = [matrix]
        while waiting:
            host, _, width, rows, pitch, _ = one = waiting.pop()
            seam = next_seam(host)
            if host + (rows - 1) * pitch + width <= seam:
                yield one
            else:
                waiting += reversed(one.cut(seam))


def copy_matrices(
    found: Iterable[Matrix], stream: torch.cuda.Stream | None, *, into_pages: bool
) -> None:
    """Queues the copies on `stream`; None copies at once, between parts of a host's memory.
    EngineError when CUDA refuses one: the earlier ones are queued then."""
    copy = _copy_on_host if stream is None else _copy_2d()
    handle = 0 if stream is None else stream.cuda_stream
    for matrix in found:
        result = copy(_order(matrix, into_pages=into_pages), handle)
        if result != 0:
            raise EngineError(f"CUDA refused a copy of {matrix} with error {result}")


class Pieces(NamedTuple):
    """Pages of the host, each with its place on the device."""

    hosts: Numbers  # addresses
    devices: Numbers
    sizes: Numbers  # bytes


def pieces_of(places: Places, targets: Sequence[tuple[int, int]]) -> Pieces:
    """Pages in order, which fill parts of the device (address, bytes) one after the other. Each
    part takes whole pages."""
    ends = np.cumsum(places.sizes)
    begins = ends - places.sizes
    filled = np.cumsum([nbytes for _, nbytes in targets])
    number = np.searchsorted(filled, begins, "right")
    addresses = np.array([address for address, _ in targets], dtype=np.int64)
    before = filled - np.array([nbytes for _, nbytes in targets], dtype=np.int64)
    devices = addresses[number] + begins - before[number]
    return Pieces(places.addresses, devices, places.sizes)


def copy_whole(
    pieces: Pieces,
    mapping: PinnedMapping,
    stream: torch.cuda.Stream | None,
    *,
    into_pages: bool,
) -> None:
    """Queues copies between pages and their places on the device. As `copy_matrices` otherwise.
    Without a step per page: matrices where pages are at regular places, else pieces."""
    joined = _joined(pieces)
    batch = None if stream is None else _copy_batch()
    found = _regular(joined, len(joined.sizes) // _FEW_ROWS if batch is not None else None)
    if found is not None:
        copy_matrices(cut_at_seams(found, mapping.next_seam), stream, into_pages=into_pages)
    elif batch is not None and stream is not None:
        hosts, devices, sizes = _cut_pieces(joined, mapping)
        targets, sources = (hosts, devices) if into_pages else (devices, hosts)
        for at in range(0, len(sizes), _AT_ONCE):
            some = slice(at, at + _AT_ONCE)
            result = batch(targets[some], sources[some], sizes[some], stream.cuda_stream)
            if result != 0:
                raise EngineError(
                    f"CUDA refused copies of {len(sizes[some])} pages: error {result}"
                )


def _joined(pieces: Pieces) -> Pieces:
    """Pages that follow each other, on the host and on the device, are one."""
    hosts, devices, sizes = pieces
    if len(sizes) < 2:
        return pieces
    follows = (hosts[1:] == (hosts + sizes)[:-1]) & (devices[1:] == (devices + sizes)[:-1])
    first = np.concatenate(([True], ~follows))
    return Pieces(hosts[first], devices[first], np.add.reduceat(sizes, np.flatnonzero(first)))


def _regular(pieces: Pieces, most: int | None) -> list[Matrix] | None:
    """Whole pages as matrices, or None where that would be more than `most`."""
    hosts, devices, sizes = pieces
    pages = len(sizes)
    pitches = hosts[1:] - hosts[:-1]
    linked = (sizes[1:] == sizes[:-1]) & (pitches >= sizes[:-1]) & (pitches <= _MOST_PITCH)
    linked &= devices[1:] - devices[:-1] == sizes[:-1]
    # Links between pages in runs of one pitch. A link that cannot be in a matrix is its own run.
    same = linked[1:] & linked[:-1] & (pitches[1:] == pitches[:-1])
    begins = [0, *(np.flatnonzero(~same) + 1).tolist()] if pages > 1 else []
    if most is not None and len(begins) > max(most, 1):
        return None
    found: list[Matrix] = []
    at = 0  # the first page that is in no matrix yet
    ends = [*begins[1:], pages - 1] if begins else []
    for begin, end in zip(begins, ends, strict=True):
        if not linked[begin] or end <= at:
            continue
        while at < begin:
            found.append(_page(pieces, at))
            at += 1
        size, pitch = int(sizes[at]), int(pitches[begin])
        found.append(Matrix(int(hosts[at]), int(devices[at]), size, end - at + 1, pitch, size))
        at = end + 1
    found += [_page(pieces, n) for n in range(at, pages)]
    return found


def _page(pieces: Pieces, at: int) -> Matrix:
    size = int(pieces.sizes[at])
    return Matrix(int(pieces.hosts[at]), int(pieces.devices[at]), size, 1, size, size)


def _cut_pieces(pieces: Pieces, mapping: PinnedMapping) -> Pieces:
    """The same bytes, and no piece crosses a seam."""
    hosts, devices, sizes = pieces
    while True:
        seams = (hosts - mapping.base) // mapping.part_bytes + 1
        seams = mapping.base + seams * mapping.part_bytes
        crossing = hosts + sizes > seams
        if not crossing.any():
            return Pieces(hosts, devices, sizes)
        first = np.where(crossing, seams - hosts, sizes)
        number = np.repeat(np.arange(len(sizes)), 1 + crossing)
        second = np.concatenate(([False], number[1:] == number[:-1]))
        hosts = np.where(second, seams[number], hosts[number])
        devices = devices[number] + np.where(second, first[number], 0)
        sizes = np.where(second, sizes[number] - first[number], first[number])


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


def _order(matrix: Matrix, *, into_pages: bool) -> _Copy2D:
    order = _Copy2D(WidthInBytes=matrix.width, Height=matrix.rows)
    if into_pages:
        order.srcMemoryType, order.srcDevice = _DEVICE, matrix.device
        order.dstMemoryType, order.dstHost = _HOST, matrix.host
        order.srcPitch, order.dstPitch = matrix.device_pitch, matrix.host_pitch
    else:
        order.srcMemoryType, order.srcHost = _HOST, matrix.host
        order.dstMemoryType, order.dstDevice = _DEVICE, matrix.device
        order.srcPitch, order.dstPitch = matrix.host_pitch, matrix.device_pitch
    return order


def _copy_on_host(order: _Copy2D, _: int) -> int:
    source = order.srcHost if order.srcMemoryType == _HOST else order.srcDevice
    target = order.dstHost if order.dstMemoryType == _HOST else order.dstDevice
    for row in range(order.Height):
        ctypes.memmove(
            target + row * order.dstPitch, source + row * order.srcPitch, order.WidthInBytes
        )
    return 0


@functools.cache
def _copy_2d() -> Callable[[_Copy2D, int], int]:
    """The driver's function. EngineError where the driver does not have it."""
    try:
        function: Any = ctypes.CDLL("libcuda.so.1").cuMemcpy2DAsync_v2
    except (OSError, AttributeError) as error:
        raise EngineError(f"CUDA's driver has no copies of matrices: {error}") from None
    function.argtypes = [ctypes.POINTER(_Copy2D), ctypes.c_void_p]
    function.restype = ctypes.c_int

    def copy(order: _Copy2D, stream: int) -> int:
        return int(function(ctypes.byref(order), stream))

    return copy


class _BatchAttributes(ctypes.Structure):
    """CUmemcpyAttributes of the driver's interface."""

    _fields_ = [
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHintType", ctypes.c_int),
        ("srcLocHintId", ctypes.c_int),
        ("dstLocHintType", ctypes.c_int),
        ("dstLocHintId", ctypes.c_int),
        ("flags", ctypes.c_uint),
    ]


@functools.cache
def _copy_batch() -> Callable[[Numbers, Numbers, Numbers, int], int] | None:
    """The driver's function, or None where the driver is older than CUDA 13."""
    try:
        function: Any = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync_v2
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_int

    def copy(targets: Numbers, sources: Numbers, sizes: Numbers, stream: int) -> int:
        # Addresses and sizes are below 2**63, so that their bits are those of unsigned numbers.
        lists = [np.ascontiguousarray(numbers) for numbers in (targets, sources, sizes)]
        attributes = _BatchAttributes(srcAccessOrder=_STREAM_ORDER)
        return int(
            function(
                *(ctypes.c_void_p(numbers.ctypes.data) for numbers in lists),
                ctypes.c_size_t(len(sizes)),
                ctypes.byref(attributes),
                (ctypes.c_size_t * 1)(0),  # the attributes are those of all pieces
                ctypes.c_size_t(1),
                ctypes.c_void_p(stream),
            )
        )

    return copy

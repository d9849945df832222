"""Queues: blocking calls, several requests in flight, asyncio."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import Any, Literal

from . import _blkio
from ._blkio import Buffer
from ._errors import ClosedError, Error

BytesLike = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Zone:
    """A zone of a zoned device. All sizes are bytes; types and states are the numbers of `blkio.h`."""

    start: int
    length: int
    capacity: int
    write_pointer: int
    type: int
    state: int
    needs_reset: bool


class Request:
    """A request on its way. Forgetting it changes nothing: it is carried out all the same."""

    __slots__ = ("_queue", "_value", "_error", "_future", "done")

    def __init__(self, queue: Queue, value: Any) -> None:
        self._queue = queue
        self._value = value
        self._error: Error | None = None
        self._future: asyncio.Future[Any] | None = None
        self.done = False
        """Whether it has ended, as far as its queue has looked."""

    def result(self, timeout: float | None = None) -> Any:
        """Waits for its end and returns its buffer, buffers or zones, or raises its `Error`; `TimeoutError` after
        `timeout` seconds."""
        self._queue._wait_for(self, timeout)
        if self._error is not None:
            raise self._error
        return self._value

    def _end(self, error: Error | None, zones: list[Zone]) -> None:
        self.done = True
        self._error = error
        if isinstance(self._value, _Zones):
            self._value = zones
        # No task listens to a future whose task was cancelled or whose loop has ended.
        future, self._future = self._future, None
        if future is None or future.done() or future.get_loop().is_closed():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(self._value)


class _Zones:
    """In the place of zones that are not known yet."""


class Queue:
    """A queue of a device, for one thread at a time. Closing it waits for what is in flight.

    Memory for reads is a `Buffer`, or a length for which one is made; for writes it is a `Buffer`, or anything like
    bytes, which is copied.
    """

    def __init__(self, device: _blkio.Device, native: _blkio.Queue) -> None:
        self._device = device
        self._native = native
        self._in_flight: dict[int, Request] = {}
        self._ended: deque[Request] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_kicked = False

    # Several requests in flight.

    def submit_read(self, offset: int, buffer: Buffer | int) -> Request:
        """Enqueues a read at byte `offset`; the result is the buffer."""
        buffer = self._device.buffer(buffer) if isinstance(buffer, int) else buffer
        return self._started(self._native.transfer(False, offset, [buffer], 0), buffer)

    def submit_write(self, offset: int, data: Buffer | BytesLike, *, fua: bool = False) -> Request:
        """Enqueues a write at byte `offset`; the result is the buffer."""
        buffer = self._memory(data)
        return self._started(self._native.transfer(True, offset, [buffer], int(fua)), buffer)

    def submit_readv(self, offset: int, buffers: Sequence[Buffer]) -> Request:
        """Enqueues a read into several buffers, in their order; the result is their list."""
        buffers = list(buffers)
        return self._started(self._native.transfer(False, offset, buffers, 0), buffers)

    def submit_writev(self, offset: int, data: Sequence[Buffer | BytesLike], *, fua: bool = False) -> Request:
        """Enqueues a write of several buffers, in their order; the result is their list."""
        buffers = [self._memory(part) for part in data]
        return self._started(self._native.transfer(True, offset, buffers, int(fua)), buffers)

    def submit_flush(self) -> Request:
        """Enqueues a flush: everything becomes durable whose write has ended before."""
        return self._started(self._native.operate("flush", 0, 0, 0), None)

    def submit_discard(self, offset: int, length: int) -> Request:
        """Enqueues a discard of bytes that are not needed any more."""
        return self._started(self._native.operate("discard", offset, length, 0), None)

    def submit_write_zeroes(
        self, offset: int, length: int, *, fua: bool = False, no_unmap: bool = False, no_fallback: bool = False
    ) -> Request:
        """Enqueues zeroing. `no_unmap`: space stays allocated; `no_fallback`: fails rather than writing zeroes as data."""
        flags = fua | no_unmap << 1 | no_fallback << 2
        return self._started(self._native.operate("write_zeroes", offset, length, flags), None)

    def submit_report_zones(self, offset: int, maximum: int) -> Request:
        """Enqueues a report of up to `maximum` zones, from the one at `offset` on; the result is their list."""
        return self._started(self._native.report_zones(offset, maximum), _Zones())

    def submit_manage_zones(
        self, action: Literal["close", "finish", "open", "reset"], offset: int | None = None
    ) -> Request:
        """Enqueues a change of the zone at `offset`, or of all zones."""
        return self._started(self._native.manage_zones(action, offset), None)

    def wait(self, minimum: int = 1, timeout: float | None = None) -> list[Request]:
        """Submits what was enqueued, waits for `minimum` requests to end, or as many as there are, and returns those that
        have ended; after `timeout` seconds perhaps fewer."""
        missing = max(0, minimum - len(self._ended))
        self._harvest(missing, timeout)
        ended = list(self._ended)
        self._ended.clear()
        return ended

    def poll(self) -> list[Request]:
        """Submits what was enqueued and returns the requests that have ended."""
        return self.wait(0)

    @property
    def outstanding(self) -> int:
        """How many requests have not ended, as far as the queue has looked."""
        return len(self._in_flight)

    # Blocking calls.

    def read(self, offset: int, buffer: Buffer | int) -> Buffer:
        """Reads at byte `offset` and returns the buffer."""
        result: Buffer = self.submit_read(offset, buffer).result()
        return result

    def write(self, offset: int, data: Buffer | BytesLike, *, fua: bool = False) -> None:
        """Writes at byte `offset`; with `fua` it is durable at the return."""
        self.submit_write(offset, data, fua=fua).result()

    def readv(self, offset: int, buffers: Sequence[Buffer]) -> list[Buffer]:
        """Reads into several buffers, in their order."""
        result: list[Buffer] = self.submit_readv(offset, buffers).result()
        return result

    def writev(self, offset: int, data: Sequence[Buffer | BytesLike], *, fua: bool = False) -> None:
        """Writes several buffers, in their order."""
        self.submit_writev(offset, data, fua=fua).result()

    def flush(self) -> None:
        """Makes everything durable whose write has ended before."""
        self.submit_flush().result()

    def discard(self, offset: int, length: int) -> None:
        """Says that bytes are not needed any more."""
        self.submit_discard(offset, length).result()

    def write_zeroes(
        self, offset: int, length: int, *, fua: bool = False, no_unmap: bool = False, no_fallback: bool = False
    ) -> None:
        """Makes bytes zero; see `submit_write_zeroes`."""
        self.submit_write_zeroes(offset, length, fua=fua, no_unmap=no_unmap, no_fallback=no_fallback).result()

    def report_zones(self, offset: int, maximum: int) -> list[Zone]:
        """Describes up to `maximum` zones, from the one at `offset` on."""
        zones: list[Zone] = self.submit_report_zones(offset, maximum).result()
        return zones

    def manage_zones(
        self, action: Literal["close", "finish", "open", "reset"], offset: int | None = None
    ) -> None:
        """Changes the zone at `offset`, or all zones."""
        self.submit_manage_zones(action, offset).result()

    # asyncio. These are no coroutines: the request is on its way when they return, whether it is awaited or not.

    def aread(self, offset: int, buffer: Buffer | int) -> asyncio.Future[Buffer]:
        """`read`, to be awaited."""
        return self._awaitable(self.submit_read, offset, buffer)

    def awrite(self, offset: int, data: Buffer | BytesLike, *, fua: bool = False) -> asyncio.Future[Buffer]:
        """`write`, to be awaited; the result is the buffer."""
        return self._awaitable(self.submit_write, offset, data, fua=fua)

    def areadv(self, offset: int, buffers: Sequence[Buffer]) -> asyncio.Future[list[Buffer]]:
        """`readv`, to be awaited."""
        return self._awaitable(self.submit_readv, offset, buffers)

    def awritev(
        self, offset: int, data: Sequence[Buffer | BytesLike], *, fua: bool = False
    ) -> asyncio.Future[list[Buffer]]:
        """`writev`, to be awaited; the result is the list of buffers."""
        return self._awaitable(self.submit_writev, offset, data, fua=fua)

    def aflush(self) -> asyncio.Future[None]:
        """`flush`, to be awaited."""
        return self._awaitable(self.submit_flush)

    def adiscard(self, offset: int, length: int) -> asyncio.Future[None]:
        """`discard`, to be awaited."""
        return self._awaitable(self.submit_discard, offset, length)

    def awrite_zeroes(self, offset: int, length: int, **flags: bool) -> asyncio.Future[None]:
        """`write_zeroes`, to be awaited."""
        return self._awaitable(self.submit_write_zeroes, offset, length, **flags)

    def areport_zones(self, offset: int, maximum: int) -> asyncio.Future[list[Zone]]:
        """`report_zones`, to be awaited."""
        return self._awaitable(self.submit_report_zones, offset, maximum)

    # Its end.

    def close(self) -> None:
        """Waits for what is in flight, then closes the queue. Closing it again does nothing."""
        try:
            self._harvest(len(self._in_flight), None)
        except ClosedError:
            return
        except Error:
            # A queue that has failed; closing it waits for the device, too.
            pass
        self._unwatch()
        self._native.close()
        for request in self._in_flight.values():
            request._end(Error(errno.ENODEV, "the queue has failed and is closed"), [])
        self._in_flight.clear()

    def __enter__(self) -> Queue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fileno(self) -> int:
        """The completion descriptor, for event loops: readable when `poll()` is worth a call, once `enable_events(True)`
        was called; -1 for a poll queue."""
        return self._native.fileno()

    def enable_events(self, enable: bool) -> None:
        """Switches events on the completion descriptor on or off; asyncio calls do it themselves."""
        self._native.enable_events(enable)

    # How it works.

    def _memory(self, data: Buffer | BytesLike) -> Buffer:
        if isinstance(data, Buffer):
            return data
        with memoryview(data).cast("B") as view:
            buffer = self._device.buffer(len(view))
            buffer[:] = view
        return buffer

    def _started(self, token: int, value: Any) -> Request:
        request = Request(self, value)
        self._in_flight[token] = request
        return request

    def _harvest(self, minimum: int, timeout: float | None) -> None:
        """Notes the ends of requests. Those that a task awaits are not listed for `wait`."""
        for token, number, message, zones in self._native.complete(minimum, timeout):
            request = self._in_flight.pop(token)
            if request._future is None:
                self._ended.append(request)
            error = Error(number, message or os.strerror(number)) if number else None
            request._end(error, [Zone(*fields) for fields in zones])

    def _wait_for(self, request: Request, timeout: float | None) -> None:
        deadline = None if timeout is None else monotonic() + timeout
        while not request.done:
            left = None if deadline is None else max(0.0, deadline - monotonic())
            self._harvest(1, left)
            if left == 0.0 and not request.done:
                raise TimeoutError(f"the request has not ended after {timeout} s")
        if request in self._ended:
            self._ended.remove(request)

    def _awaitable(self, submit: Any, *arguments: Any, **options: Any) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        self._watch(loop)
        request: Request = submit(*arguments, **options)
        request._future = future = loop.create_future()
        if not self._is_kicked:
            # Requests that are made in one turn of the loop go to the device together.
            self._is_kicked = True
            loop.call_soon(self._on_event)
        return future

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("the queue has requests of another event loop in flight")
        fd = self._native.fileno()
        if fd < 0:
            raise RuntimeError("a poll queue has no completion descriptor")
        self._native.enable_events(True)
        loop.add_reader(fd, self._on_event)
        self._loop, self._is_kicked = loop, False

    def _unwatch(self) -> None:
        loop, self._loop, self._is_kicked = self._loop, None, False
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._native.fileno())
            self._native.enable_events(False)

    def _on_event(self) -> None:
        self._is_kicked = False
        if self._loop is None:
            return
        self._harvest(0, None)
        if not self._in_flight:
            # The next loop may be another one.
            self._unwatch()


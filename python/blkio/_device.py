"""Devices and their properties."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from types import TracebackType
from typing import Any

from . import _blkio
from ._blkio import Buffer
from ._errors import Error, UnknownPropertyError
from ._queue import Queue

Value = bool | int | str


class Properties(MutableMapping[str, Value]):
    """The properties of a device by name. Reading one that is not known before `connect()`, or writing one too late,
    raises `Error`."""

    def __init__(self, native: _blkio.Device) -> None:
        self._native = native

    def __getitem__(self, name: str) -> Value:
        try:
            return self._native.get(name)
        except Error as error:
            raise _unknown(error, name) from None

    def __setitem__(self, name: str, value: Value) -> None:
        if not isinstance(value, (bool, int, str)):
            raise TypeError(f"property {name}: bool, int or str, not {type(value).__name__}")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        try:
            self._native.set(name, text)
        except Error as error:
            raise _unknown(error, name) from None

    def __delitem__(self, name: str) -> None:
        raise TypeError("properties cannot be deleted")

    def __iter__(self) -> Iterator[str]:
        return iter(self._native.names())

    def __len__(self) -> int:
        return len(self._native.names())


def _unknown(error: Error, name: str) -> Error:
    if error.errno == errno.ENOENT:
        return UnknownPropertyError(error.errno, error.strerror)
    return error


class Device:
    """A device of a driver: described by its properties, then connected, then started.

    As a context manager it is started on entry and closed, with its queues, on exit.
    """

    def __init__(self, driver: str, properties: Mapping[str, Value] | None = None, /, **more: Value) -> None:
        """Sets properties from the mapping and from keywords, in which `_` stands for `-`. Those that can be set only
        when the device is connected are kept until then."""
        self._native = _blkio.Device(driver)
        self._queues: weakref.WeakSet[Queue] = weakref.WeakSet()
        self.properties = Properties(self._native)
        self.properties.update(properties or {})
        for name, value in more.items():
            self.properties[name.replace("_", "-")] = value

    @property
    def state(self) -> str:
        """`created`, `connected`, `started` or `closed`; `busy` while another thread changes it."""
        return self._native.state

    def connect(self) -> Device:
        """Opens the device; it is closed after an error."""
        self._native.connect()
        return self

    def start(self) -> Device:
        """Opens the device and its queues; it is closed after an error."""
        self._native.start()
        return self

    @property
    def capacity(self) -> int:
        """Bytes on the device now."""
        capacity: Any = self.properties["capacity"]
        return int(capacity)

    def buffer(self, length: int) -> Buffer:
        """Memory for `length` bytes, for requests to this device."""
        return self._native.buffer(length)

    def queue(self, index: int = 0) -> Queue:
        """Lends the queue at `index`, one of `num-queues`, until it is closed."""
        return self._lent(self._native.queue(index, False))

    def poll_queue(self, index: int = 0) -> Queue:
        """Lends the poll queue at `index`, one of `num-poll-queues`, until it is closed."""
        return self._lent(self._native.queue(index, True))

    def add_queue(self) -> Queue:
        """Opens one more queue."""
        return self._lent(self._native.add_queue(False))

    def add_poll_queue(self) -> Queue:
        """Opens one more poll queue."""
        return self._lent(self._native.add_queue(True))

    def _lent(self, native: _blkio.Queue) -> Queue:
        queue = Queue(self._native, native)
        self._queues.add(queue)
        return queue

    def close(self) -> None:
        """Closes its queues, after what they have in flight has ended, and the device."""
        for queue in list(self._queues):
            queue.close()
        self._native.close()

    def __enter__(self) -> Device:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<blkio.Device {self.state}>"


def open(driver: str, properties: Mapping[str, Value] | None = None, /, **more: Value) -> Device:
    """A started device; properties as for `Device`."""
    return Device(driver, properties, **more).start()

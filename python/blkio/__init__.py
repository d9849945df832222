"""Block devices: files, NVMe, virtio-blk and more behind one API.

    import blkio

    with blkio.open("io_uring", path="disk.img") as device, device.queue() as queue:
        queue.write(4096, b"some bytes")
        queue.flush()
        print(bytes(queue.read(4096, 10)))

A `Device` has properties and makes `Queue`s and `Buffer`s. A queue is used by one thread at a time: with blocking calls
(`read`, `write`, …), with several requests in flight (`submit_read`, …, `wait`), or from asyncio (`aread`, …). Errors are
`Error`s, which are `OSError`s with errno.
"""

from ._blkio import Buffer
from ._device import Device, Properties, open
from ._errors import ClosedError, Error, UnknownPropertyError
from ._queue import Queue, Request, Zone

__all__ = [
    "Buffer",
    "ClosedError",
    "Device",
    "Error",
    "Properties",
    "Queue",
    "Request",
    "UnknownPropertyError",
    "Zone",
    "open",
]

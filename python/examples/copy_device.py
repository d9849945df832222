#!/usr/bin/env python3
"""Copies a file or block device to another with asyncio, several requests in flight: copy_device.py SOURCE TARGET"""

import asyncio
import sys

import blkio

STEP = 256 << 10
DEPTH = 16


async def copy(source: blkio.Device, target: blkio.Device) -> int:
    capacity = source.capacity
    offsets = iter(range(0, capacity, STEP))
    with source.queue() as reads, target.queue() as writes:

        async def worker() -> None:
            for offset in offsets:
                data = await reads.aread(offset, min(STEP, capacity - offset))
                with memoryview(data) as view:
                    await writes.awrite(offset, view)

        await asyncio.gather(*(worker() for _ in range(DEPTH)))
        await writes.aflush()
    return capacity


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: copy_device.py SOURCE TARGET")
    try:
        with (
            blkio.open("io_uring", path=sys.argv[1], read_only=True) as source,
            blkio.open("io_uring", path=sys.argv[2]) as target,
        ):
            print(asyncio.run(copy(source, target)), "bytes")
    except blkio.Error as error:
        sys.exit(f"error: {error}")


main()

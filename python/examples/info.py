#!/usr/bin/env python3
"""Prints all properties of a device: info.py io_uring path=disk.img"""

import sys

import blkio


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: info.py DRIVER PROPERTY=VALUE…")
    properties = dict(argument.split("=", 1) for argument in sys.argv[2:])
    try:
        with blkio.open(sys.argv[1], properties) as device:
            for name, value in device.properties.items():
                print(f"{name} = {value}")
    except blkio.Error as error:
        sys.exit(f"error: {error}")


main()

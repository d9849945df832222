#!/usr/bin/env python3
"""Calls of CSI as JSON, for callers without its messages: the lab, and guests.

    tests/csi/call.py SOCKET <CALLS

CALLS is a list of [NAME, FIELDS]. They are sent one after the other, when a process listens at SOCKET. The output is the list of
their answers; one that is refused has `code` and `message`."""

import json
import os
import socket
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
REPO = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [HERE, os.path.join(REPO, "tests", "lab"), os.path.join(REPO, "target", "csi", "messages")]

from driver import CALL_TIMEOUT_S, CallError, channel_to, request, send  # noqa: E402
from google.protobuf import json_format  # noqa: E402


def wait_for(path):
    deadline = time.monotonic() + CALL_TIMEOUT_S
    while True:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(path) == 0:
                return
        if time.monotonic() > deadline:
            sys.exit(f"no process listens at {path}")
        time.sleep(0.1)


def answer(channel, name, fields):
    try:
        found = send(channel, name, json_format.ParseDict(fields, request(name)()))
    except CallError as error:
        return {"code": error.code, "message": error.message}
    return json_format.MessageToDict(found, preserving_proto_field_name=True)


if __name__ == "__main__":
    wait_for(sys.argv[1])
    to_driver = channel_to(sys.argv[1])
    json.dump([answer(to_driver, name, fields) for name, fields in json.load(sys.stdin)], sys.stdout)

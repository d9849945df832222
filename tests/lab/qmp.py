"""A client of QMP, the control socket of QEMU and qemu-storage-daemon: one command at a time."""

import json
import socket


class QmpError(Exception):
    """QEMU refused a command, or its socket is gone."""


class Qmp:
    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.file = self.socket.makefile("rw")
        self.file.readline()  # the greeting
        self.run("qmp_capabilities")

    def run(self, command, **arguments):
        """Run a command and return its result; events on the way are dropped."""
        self.file.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
        self.file.flush()
        while True:
            line = self.file.readline()
            if not line:
                raise QmpError(f"{command}: the connection was closed")
            reply = json.loads(line)
            if "error" in reply:
                raise QmpError(f"{command}: {reply['error']['desc']}")
            if "return" in reply:
                return reply["return"]

    def close(self):
        self.file.close()
        self.socket.close()

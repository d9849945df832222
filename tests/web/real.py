"""freestoned itself, for tests and pictures of its page."""

import json
import os
import shutil
import tempfile

import paths
from freestoned import Freestoned

TOKEN = "web-0123456789abcdef0123456789"


class Real:
    """A daemon in the mock's place; `prefix` is a command that starts it, `directory` an empty one for it."""

    def __init__(self, listen="127.0.0.1:0", prefix=(), directory=None):
        paths.require_freestone()
        self.directory = directory or tempfile.mkdtemp(prefix="web-")
        tokens = os.path.join(self.directory, "tokens")
        with open(os.open(tokens, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(f"admin web {TOKEN}\n")
        self.daemon = Freestoned(os.path.join(self.directory, "d"), "--listen", listen, "--json", "--tokens", tokens)
        self.daemon.prefix = list(prefix)
        self.daemon.start()
        self.url = f"http://{self.daemon.wait_for('the address', self._address)}/"

    def _address(self):
        with open(self.daemon.path("freestoned.log")) as log:
            lines = [json.loads(line) for line in log if line.startswith("{")]
        return next((line["listen"] for line in lines if line.get("message") == "ready"), None)

    def close(self):
        self.daemon.close()
        shutil.rmtree(self.directory, ignore_errors=True)

"""The API against its document: whatever schemathesis makes up is answered as docs/openapi.json says."""

import json
import os
import re
import subprocess

import paths
from freestoned import MIB

VENV = os.path.join(paths.REPO, "target", "daemon", "venv")
TOKEN = "contract-0123456789abcdef0123"
# Whether a device is there, the document cannot say: input that it calls good may be refused. Streams do not end.
OPTIONS = ["--phases", "coverage,fuzzing", "--exclude-path", "/v1/events/stream", "-n", "40", "--seed", "1",
           "--exclude-checks", "positive_data_acceptance", "--generation-allow-x00", "false"]

# A list that is longer than the document allows may be a body or a query that is longer than any may be: 413 and 414 refuse it, too.
CONFIGURATION = """
[checks.negative_data_rejection]
expected-statuses = ["400", "401", "403", "404", "405", "406", "409", "413", "414", "415", "422", "428", "429", "5xx"]
"""


def generated_requests_are_answered_as_the_document_says(subject):
    daemon = subject.daemon("--listen", "127.0.0.1:0", "--json", "--tokens", _tokens(subject))
    daemon.post("/v1/devices", {"name": "data", "spec": daemon.file("disk", 64 * MIB)})
    daemon.post("/v1/volumes", {"name": "v1", "backing": "data", "size_bytes": MIB})
    daemon.post("/v1/exports", {"name": "e1", "kind": "nbd", "volumes": ["v1"]})
    address = _address(daemon)
    configuration = os.path.join(subject.scratch, "schemathesis.toml")
    with open(configuration, "w") as file:
        file.write(CONFIGURATION)
    # Where it runs, files that it is told to make lie.
    done = subprocess.run(
        [os.path.join(VENV, "bin", "schemathesis"), "--config-file", configuration, "run", os.path.join(paths.REPO, "docs", "openapi.json"),
         "-u", f"http://{address}", "-H", f"Authorization: Bearer {TOKEN}", *OPTIONS],
        cwd=subject.scratch, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]
    generated = re.search(r"(\d+) generated", done.stdout)
    assert generated and int(generated[1]) > 300, done.stdout[-1000:]
    # It lives, and things of others were not touched.
    assert [volume["name"] for volume in daemon.get("/v1/volumes")].count("v1") <= 1
    return f"{generated[1]} requests"


def _tokens(subject):
    path = os.path.join(subject.scratch, "tokens")
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write(f"admin contract {TOKEN}\n")
    return path


def _address(daemon):
    def ready():
        with open(daemon.path("freestoned.log")) as log:
            lines = [json.loads(line) for line in log if line.startswith("{")]
        return next((line["listen"] for line in lines if line.get("message") == "ready"), None)

    return daemon.wait_for("the address in the log", ready)

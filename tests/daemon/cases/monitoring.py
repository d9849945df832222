"""What is shipped for monitoring names metrics that the daemon has."""

import json
import os
import re

import paths
from freestoned import MIB

MONITORING = os.path.join(paths.REPO, "docs", "monitoring")


def dashboard_and_alerts_ask_for_metrics_that_are_there(subject):
    daemon = subject.daemon()
    members = [daemon.file(f"m{slot}", 64 * MIB) for slot in range(4)]
    daemon.post("/v1/arrays", {"name": "data", "level": "5", "members": members})
    daemon.post("/v1/volumes", {"name": "v1", "backing": "data", "size_bytes": MIB})
    daemon.post("/v1/exports", {"name": "e1", "kind": "nbd", "volumes": ["v1"]})
    known = set(re.findall(r"^# TYPE (freestone_\w+) ", daemon.get("/metrics"), re.MULTILINE))
    assert len(known) > 20, known
    with open(os.path.join(MONITORING, "grafana.json")) as file:
        dashboard = json.load(file)
    with open(os.path.join(MONITORING, "alerts.yml")) as file:
        alerts = file.read()
    asked = set(re.findall(r"\bfreestone_\w+", json.dumps(dashboard["panels"]) + alerts))
    unknown = {name for name in asked if re.sub("_(bucket|sum|count)$", "", name) not in known}
    assert asked and not unknown, unknown
    documented = set()
    with open(os.path.join(paths.REPO, "docs", "metrics.md")) as file:
        documented = set(re.findall(r"`(freestone_\w+)`", file.read()))
    assert documented == known, (documented - known, known - documented)

"""Each alert fires where it must, and only there. promtool judges the rules on series that this file makes."""

import json
import os
import re
import subprocess

import paths

RULES = os.path.join(paths.REPO, "docs", "monitoring", "alerts.yml")
PROMTOOL = os.path.join(paths.REPO, "target", "daemon", "promtool")
# Time begins at 0.
DAY_S = 24 * 60 * 60
DAY_MIN = 24 * 60
# Labels that Prometheus adds: of two hosts with equal names, only host a has problems.
A, B = 'job="freestone",instance="a"', 'job="freestone",instance="b"'


def _both(name, labels, bad, good):
    """Series of both hosts."""
    return {f"{name}{{{A},{labels}}}": bad, f"{name}{{{B},{labels}}}": good}


def _latency(name, labels, slow_of_100, minutes=30):
    """A histogram of 100 requests a minute, some of which take between 0.2 and 0.5 s, and the others up to 1 ms."""
    fast = 100 - slow_of_100
    buckets = {"0.001": fast, "0.2": fast, "0.5": 100, "+Inf": 100}
    series = {f'{name}_bucket{{{labels},le="{le}"}}': f"0+{count}x{minutes}" for le, count in buckets.items()}
    return {**series, f"{name}_count{{{labels}}}": f"0+100x{minutes}"}


def _members(array, slow_of_100):
    """The members of an array: slot 0 with so many slow requests of 100, the others with none."""
    def member(slot, slow):
        return _latency("freestone_member_latency_seconds", f'{A},array="{array}",slot="{slot}",device="d{slot}",op="read"', slow)
    return {key: value for slot, slow in enumerate(slow_of_100) for key, value in member(slot, slow).items()}


def _limited(volume, slow_of_100, sum_s, waits_s):
    """A volume, the request time of a minute, and the waits in it for its own limits and its group's."""
    labels = f'{A},volume="{volume}"'
    waits = zip(("volume", "group"), waits_s)
    return {**_latency("freestone_volume_latency_seconds", f'{labels},op="write"', slow_of_100),
            f'freestone_volume_latency_seconds_sum{{{labels},op="write"}}': f"0+{sum_s}x30",
            # Flushes do not wait for limits.
            f'freestone_volume_latency_seconds_sum{{{labels},op="flush"}}': "0+60x30",
            f'freestone_volume_size_bytes{{{labels},backing="data"}}': "1x30",
            **{f'freestone_volume_throttled_seconds_total{{{labels},limit="{limit}"}}': f"0+{wait}x30" for limit, wait in waits}}


# The alert, its series, the minute at which it is looked for, labels beyond the host's, and the summary.
CASES = [
    ("FreestoneDown", {f"up{{{A}}}": "1 0x20", f"up{{{B}}}": "1x20"}, 10, {}, "freestoned on a does not answer"),
    ("FreestoneStateNotWritten", {f"freestone_state_write_failures_total{{{A}}}": "0 1x30", f"freestone_state_write_failures_total{{{B}}}": "7x31"}, 20,
     {}, "freestoned on a cannot write its state: changes fail"),
    ("FreestoneArrayFailed", _both("freestone_array_state", 'array="data",state="failed"', "1x20", "0x20"), 10,
     {"array": "data", "state": "failed"}, "array data is failed"),
    ("FreestoneArrayDegraded", _both("freestone_array_state", 'array="data",state="degraded"', "1x20", "0x20"), 10,
     {"array": "data", "state": "degraded"}, "array data lacks a member"),
    ("FreestoneArrayWithoutRedundancy",
     # Host b has an array that never has redundancy, and one that has some left.
     {**_both("freestone_array_redundancy_left", 'array="data"', "0x20", "1x20"),
      **_both("freestone_array_state", 'array="data",state="degraded"', "1x20", "1x20"),
      f'freestone_array_redundancy_left{{{B},array="fast"}}': "0x20",
      f'freestone_array_state{{{B},array="fast",state="degraded"}}': "0x20"},
     10, {"array": "data"}, "array data has no redundancy left: the next failure of a member loses data"),
    ("FreestoneArrayDegradedWithoutRebuild",
     {**_both("freestone_array_state", 'array="data",state="degraded"', "1x30", "1x30"),
      f'freestone_job_total_bytes{{{B},array="data",kind="rebuild",exported_job="data.rebuild.1"}}': "9x30"},
     20, {"array": "data", "state": "degraded"}, "array data lacks a member, and nothing takes its place: it needs a spare"),
    ("FreestoneArrayWithoutSpare",
     {**_both("freestone_array_spares", 'array="data"', f"0x{2 * DAY_MIN}", f"0x{2 * DAY_MIN}"),
      f'freestone_array_info{{{A},array="data",level="6",consistency="ppl"}}': f"1x{2 * DAY_MIN}",
      f'freestone_array_info{{{B},array="data",level="10",consistency="bitmap"}}': f"1x{2 * DAY_MIN}"},
     DAY_MIN + 60, {"array": "data"}, "array data has no spare"),
    ("FreestoneMismatchedRows", _both("freestone_array_mismatched_rows", 'array="data"', "7x9", "0x9"), 5,
     {"array": "data"}, "a scrub of array data found 7 rows that do not fit"),
    ("FreestoneContradictions", _both("freestone_array_contradictions_total", 'array="data"', "0 1x60", "1x61"), 30,
     {"array": "data"}, "strips of array data contradicted each other: a member returns wrong data. Run a check"),
    ("FreestoneScrubOverdue",
     _both("freestone_array_next_scrub_timestamp_seconds", 'array="data"', f"{-8 * DAY_S}x9", f"{-6 * DAY_S}x9"),
     5, {"array": "data"}, "the scheduled scrub of array data has been due for a week"),
    ("FreestoneArrayNotScrubbed",
     # On host b one array was scrubbed lately, and one has no redundancy.
     {f"freestone_start_time_seconds{{{A}}}": f"{-36 * DAY_S}x90", f"freestone_start_time_seconds{{{B}}}": f"{-36 * DAY_S}x90",
      **_both("freestone_array_info", 'array="data",level="6",consistency="ppl"', "1x90", "1x90"),
      f'freestone_array_info{{{B},array="fast",level="0",consistency="none"}}': "1x90",
      f'freestone_array_last_scrub_timestamp_seconds{{{B},array="data"}}': f"{-30 * DAY_S}x90"},
     70, {"array": "data"}, "array data has had no complete scrub for 36d 1h 10m 0s"),
    ("FreestoneMemberErrors",
     _both("freestone_member_errors_total", 'array="data",slot="3",device="/dev/sdd",op="read"', "0 32x30", "32x31"), 20,
     {"array": "data", "slot": "3", "device": "/dev/sdd"}, "the drive /dev/sdd in slot 3 of array data has failed requests"),
    # All members of one array are equally slow, and those of another one are fast.
    ("FreestoneMemberSlow", {**_members("data", (5, 0, 0, 0)), **_members("old", (5, 5, 5)), **_members("fast", (0, 0))}, 25,
     {"array": "data", "slot": "0"},
     "slot 0 of array data is much slower than the other members: one of a hundred requests takes over 440ms"),
    ("FreestoneMemberSlow", _members("mirror", (5, 0)), 25, {"array": "mirror", "slot": "0"},
     "slot 0 of array mirror is much slower than the other members: one of a hundred requests takes over 440ms"),
    ("FreestoneDriveWear", _both("freestone_device_wear_ratio", 'device="/dev/nvme0n1"', "0.93x30", "0.89x30"), 20,
     {"device": "/dev/nvme0n1"}, "the drive /dev/nvme0n1 has used 93% of its endurance"),
    ("FreestoneDriveWarning", _both("freestone_device_critical_warning", 'device="/dev/nvme0n1"', "4x20", "0x20"), 10,
     {"device": "/dev/nvme0n1"}, "the drive /dev/nvme0n1 warns, or has little spare capacity left"),
    # Without a warning of its own; on host b the spare capacity is at its threshold.
    ("FreestoneDriveWarning",
     {**_both("freestone_device_critical_warning", 'device="fast"', "0x20", "0x20"),
      **_both("freestone_device_spare_ratio", 'device="fast"', "0.09x20", "0.1x20"),
      **_both("freestone_device_spare_threshold_ratio", 'device="fast"', "0.1x20", "0.1x20")},
     10, {"device": "fast"}, "the drive fast warns, or has little spare capacity left"),
    ("FreestoneJobStandsStill",
     _both("freestone_job_rate_bytes", 'array="data",kind="check",exported_job="data.check"', "0x60", "5x60"), 40,
     {"array": "data", "kind": "check", "exported_job": "data.check"}, "job data.check does not go on"),
    ("FreestoneExportDown", _both("freestone_export_up", 'export="e1",kind="nbd"', "0x9", "1x9"), 5,
     {"export": "e1", "kind": "nbd"}, "export e1 (nbd) is not served"),
    ("FreestonePortalDown", _both("freestone_portal_up", 'portal="net"', "0x9", "1x9"), 5,
     {"portal": "net"}, "portal net does not listen, so its exports wait"),
    ("FreestonePortalNearlyFull",
     {**_both("freestone_portal_connections", 'portal="net",address="::1"', "95x20", "50x20"),
      **_both("freestone_portal_connections_limit", 'portal="net"', "100x20", "100x20")},
     10, {"portal": "net", "address": "::1"}, "portal net has 90 % of its connections at ::1: more hosts will be refused"),
    ("FreestoneErrors", _both("freestone_volume_errors_total", 'volume="v1",op="read"', "0+1x9", "3x9"), 7,
     {"volume": "v1", "op": "read"}, "volume v1: 5 requests failed in five minutes"),
    ("FreestoneArrayFull",
     {**_both("freestone_array_free_bytes", 'array="data"', "4x90", "6x90"),
      **_both("freestone_array_capacity_bytes", 'array="data"', "100x90", "100x90")},
     70, {"array": "data"}, "array data has less than 5 % free for volumes"),
    # A volume for archives has a limit of its own, and stays below it.
    ("FreestoneSlow",
     {key: value for volume, slow in (("v1", 5), ("v2", 0), ("archive-1", 5)) for key, value in
      {**_latency("freestone_volume_latency_seconds", f'{A},volume="{volume}",op="read"', slow),
       f'freestone_volume_size_bytes{{{A},volume="{volume}",backing="data"}}': "1x30"}.items()},
     25, {"volume": "v1"}, "volume v1: one of a hundred requests takes over 440ms"),
    # A volume that is slow because of its limits is limited; one that is slow without the waits, too, is both.
    ("FreestoneSlow", {**_limited("v1", 5, 1.6, (0.9, 0.6)), **_limited("v2", 100, 40, (24, 0))}, 25, {"volume": "v2"},
     "volume v2: one of a hundred requests takes over 497ms"),
    ("FreestoneLimited", {**_limited("v1", 5, 1.6, (0.9, 0.6)), **_limited("v2", 5, 1.6, (0.4, 0.3)), **_limited("v3", 0, 0, (0, 0))}, 25,
     {"volume": "v1"}, "volume v1: 93.75% of the request time of 15 minutes was waiting for its limits"),
]


def _case(alert, series, minute, labels, summary):
    annotations = {"summary": summary, "runbook_url": f"docs/operations.md#{alert.lower()}"}
    expected = {"exp_labels": {"job": "freestone", "instance": "a", "severity": _severities()[alert], **labels}, "exp_annotations": annotations}
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": [expected]}],
    }


def _severities():
    with open(RULES) as file:
        found = re.findall(r"- alert: (\w+)\n.*?severity: (\w+)", file.read(), re.DOTALL)
    return dict(found)


def _groups():
    """The groups of rules in the order of the file: the alerts use what earlier groups record. promtool takes any other order by chance."""
    with open(RULES) as file:
        return re.findall(r"^  - name: (\S+)$", file.read(), re.MULTILINE)


def each_alert_fires_for_its_problem_and_not_for_others(subject):
    assert set(_severities()) == {case[0] for case in CASES}, "each alert has a case"
    path = os.path.join(subject.scratch, "cases.json")
    with open(path, "w") as file:
        json.dump({
            "rule_files": [RULES], "group_eval_order": _groups(), "evaluation_interval": "1m", "tests": [_case(*case) for case in CASES],
        }, file)
    for command in (("check", "rules", RULES), ("test", "rules", path)):
        done = subprocess.run([PROMTOOL, *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

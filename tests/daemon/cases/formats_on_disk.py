"""The fixtures of all releases (tests/formats): this version serves what they hold, and refuses the formats of a later one."""

import os
import shutil
import subprocess
import sys

import paths

sys.path.insert(0, os.path.join(paths.REPO, "tests", "formats"))

import formats  # noqa: E402 # after the path to it
import nbd_wire  # noqa: E402
import scene  # noqa: E402
from freestoned import Freestoned  # noqa: E402
from nvme_host import Host  # noqa: E402

POSTED = ("POST", "/v1/volumes", scene.KEYED_VOLUME, {"Idempotency-Key": scene.KEY})


def _daemon(subject, name):
    """A daemon that is not started yet, in a new directory."""
    daemon = Freestoned(os.path.join(subject.scratch, name))
    subject.ends.callback(daemon.close)
    return daemon


def _unpacked(subject, release, name):
    daemon = _daemon(subject, name)
    scene.unpack(release, daemon.directory)
    # The fixture has it for root.
    keys = daemon.path("state/idempotency")
    os.rename(os.path.join(keys, formats.key_name(0, scene.KEY)), os.path.join(keys, formats.key_name(os.geteuid(), scene.KEY)))
    return daemon


def _check_content(daemon):
    for name in scene.DISKS:
        found, = nbd_wire.read_export(daemon.path(f"{name}.sock"), [(0, scene.DATA_BYTES)], name)
        assert found == formats.pattern(name, scene.DATA_BYTES), f"{name} has other data"
    volumes = {volume["name"]: volume for volume in daemon.get("/v1/volumes")}
    assert sorted(volumes) == ["v1", "v2"] and volumes["v1"]["labels"] == {"a": "b"}, volumes
    assert volumes["v2"]["qos"]["iops"]["per_s"] == 5000, volumes["v2"]
    hosts = daemon.get(f"/v1/exports/{scene.SECRET}")["hosts"]
    assert hosts == [scene.HOST], hosts
    portal = daemon.get("/v1/portals/n")
    assert (portal["kind"], portal["options"]) == ("nbd", {"default-export": scene.DEFAULT_EXPORT}), portal
    # The answer of the fixture's request: v1 exists, so another request would be refused.
    status, _, answer = daemon.request(*POSTED)
    assert (status, answer.get("name")) == (201, "v1"), (status, answer)
    host = Host(scene.address(daemon), scene.SUBSYSTEMS[scene.RESERVED], scene.HOST, scene.HOST_ID)
    reserved = host.reservations()
    host.close()
    assert reserved == (1, [(scene.RESERVATION_KEY, scene.HOST_ID)]), reserved


def fixtures_of_all_releases_are_served(subject):
    for release in formats.releases():
        daemon = _unpacked(subject, release, release)
        daemon.start()
        assert daemon.get("/v1/health") == [], daemon.get("/v1/health")
        _check_content(daemon)
        daemon.stop()
        # The next start finds what this version has written.
        daemon.start()
        _check_content(daemon)
        daemon.stop()
        members = [daemon.path(name) for name in formats.MEMBERS]
        for devices in (members, [daemon.path(formats.POOL)]):
            checked = subprocess.run([paths.RAID_CHECK, *devices], capture_output=True, text=True, timeout=60, check=False)
            assert checked.returncode == 0, checked.stdout + checked.stderr
    return f"releases {', '.join(formats.releases())}"


class _Refusing:
    """A fixture with formats of a later version, and a copy of it for comparison."""

    def __init__(self, subject, name, *raised):
        self.daemon = _unpacked(subject, formats.releases()[-1], name)
        self.versions = {format: formats.FORMATS[format].found_in(self.daemon.directory)[-1] for format in raised}
        for format in raised:
            formats.FORMATS[format].raise_in(self.daemon.directory)
        self.files = [path for format in raised for path in formats.FORMATS[format].of(self.daemon.directory)]
        self.copy = os.path.join(subject.scratch, f"{name}-before")
        shutil.copytree(self.daemon.directory, self.copy)

    def check_unchanged(self, but=lambda data: data):
        """The files have the bytes that they had, as `but` returns them."""
        for path in self.files:
            contents = []
            for name in (path, os.path.join(self.copy, os.path.relpath(path, self.daemon.directory))):
                with open(name, "rb") as file:
                    contents.append(but(file.read()))
            assert contents[0] == contents[1], f"{path} was changed"

    def words(self, format):
        """(version that was found, version that is supported)"""
        return self.versions[format] + 1, self.versions[format]


def _text_of(problems, kind, name):
    """The text of the problem that an object has."""
    texts = [problem["text"] for problem in problems if (problem["kind"], problem["object"]) == (kind, name)]
    assert len(texts) == 1, (kind, name, problems)
    return texts[0]


def objects_in_formats_of_a_later_version_are_refused_by_name_and_unchanged(subject):
    later = _Refusing(subject, "later", "superblock", "pool table", "qcow2 image", "host-secrets", "idempotency")
    daemon = later.daemon
    daemon.start()
    problems = daemon.get("/v1/health")
    array = _text_of(problems, "array", "data")
    for name in formats.MEMBERS:
        found, supported = later.words("superblock")
        assert f"{daemon.path(name)}: superblock version {found}: supported is version {supported}" in array, array
    for kind, name, format, words in (
            ("device", "pool", "pool table", f"{daemon.path(formats.POOL)}: the pool has format %d, and this version supports only %d"),
            ("device", "image", "qcow2 image", f"{daemon.path(formats.IMAGE)}: unsupported: version %d: 2 and %d are supported"),
            ("export", scene.SECRET, "host-secrets", f"{daemon.path('state/host-secrets')}/{scene.SECRET}.json: version %d: only %d is known")):
        text = _text_of(problems, kind, name)
        assert words % later.words(format) in text, text
    status, _, answer = daemon.request(*POSTED)
    assert (status, answer["type"]) == (409, "interrupted"), answer
    assert "cannot be read: format %d: want %d" % later.words("idempotency") in answer["detail"], answer
    daemon.stop()
    later.check_unchanged()


def a_log_and_reservations_of_a_later_version_are_refused_by_name_and_unchanged(subject):
    later = _Refusing(subject, "log", "log entry", "reservations")
    daemon = later.daemon
    daemon.start()
    problems = daemon.get("/v1/health")
    text = _text_of(problems, "array", "data")
    assert "data: log of member" in text and "an entry has version %d; supported is version %d" % later.words("log entry") in text, text
    text = _text_of(problems, "export", scene.RESERVED)
    assert daemon.path("state/reservations") in text and "version %d: only %d is known" % later.words("reservations") in text, text
    daemon.stop()
    # Each start of an array begins with a superblock of the next generation.
    later.check_unchanged(formats.without_superblocks)


def a_state_of_a_later_version_keeps_the_daemon_from_starting_and_is_unchanged(subject):
    later = _Refusing(subject, "state", "state.json")
    later.daemon.start(wait=False)
    code = later.daemon.process.wait(timeout=60)
    found, supported = later.words("state.json")
    assert code == 1, later.daemon.log()
    for word in (later.daemon.path(formats.STATE), f"format {found}", f"{supported}"):
        assert word in later.daemon.log(), (word, later.daemon.log())
    later.check_unchanged()

"""Power cuts of an array with a pool of volumes, replayed from the log of its disks (logged_disks.py).

At a moment of the log each disk holds what a flush has made durable. Of the other writes some survive, whole or torn at a
sector (SURVIVALS). The release binaries then assemble the array on files of this content, check it, start the daemon on it
and read the volumes. The notes of the writer say which content is right: of each sector what was durable last, or anything
that was begun since.
"""

import dataclasses
import os
import random
import shutil
import struct
import subprocess

import paths
from freestoned import DaemonError, Freestoned
from logged_disks import SECTOR, Done, Flush, Write
from nbd_wire import read_export
from raid_server import raid_check
from server import ServerError

ARRAY, VOLUME, OTHER = "data", "v1", "other"
SURVIVALS = ("none", "any", "half", "all")
WORD = struct.Struct("<QQ")
NEVER_WRITTEN = (None, 0)
POOL_MAGIC = b"FsPool\0\0"  # docs/on-disk-formats.md


def sector_of(tag, sector):
    """What guest/noting-writer writes to a sector; the tag 0 stands for zeroes."""
    return WORD.pack(tag, sector) * (SECTOR // WORD.size) if tag else bytes(SECTOR)


@dataclasses.dataclass
class _Pending:
    """A write that is not durable yet."""

    write: Write
    is_done: bool = False


class Moment:
    """Everything at one moment of the log."""

    def __init__(self, count, size, lie_every=None):
        """lie_every: every so many-th write of the writer's data is lost although it was made durable."""
        self.disks = [bytearray(size) for _ in range(count)]
        self.pending, self.flushes = {}, {}
        self.is_ready = False
        # What may stand in a sector, by its number: (write, tag), the durable one first. Sizes of volumes likewise.
        self.tags, self.volumes = {}, {}
        self._begun = {}
        self._lie_every, self._durable = lie_every, 0

    def advance(self, event):
        """Takes the next event; returns whether it made more durable."""
        if isinstance(event, Write):
            self.pending[event.number] = _Pending(event)
        elif isinstance(event, Flush):
            covered = [number for number, entry in self.pending.items() if entry.is_done and entry.write.disk == event.disk]
            self.flushes[event.number] = covered
        elif isinstance(event, Done):
            return self._done(event.number)
        else:
            self._note(event)
        return False

    def _done(self, number):
        if number in self.flushes:
            return self._harden(self.flushes.pop(number))
        entry = self.pending[number]
        entry.is_done = True
        return entry.write.is_fua and self._harden([number])

    def _harden(self, numbers):
        """These writes are durable now."""
        numbers = [number for number in numbers if number in self.pending]
        for number in numbers:
            write = self.pending.pop(number).write
            if not self._is_lie(write):
                self.disks[write.disk][write.offset:write.offset + write.length] = _bytes(write)
        return bool(numbers)

    def writes_pool_table(self):
        """Whether a copy of the pool's table is written and not durable. A copy begins where a strip does."""
        return any(entry.write.data is not None and entry.write.data.startswith(POOL_MAGIC) for entry in self.pending.values())

    def _is_lie(self, write):
        """Whether the disk loses this write. Metadata stays: an array that is not assembled would show nothing else."""
        if not self._lie_every or write.data is None or len(write.data) < SECTOR:
            return False
        tag, sector = WORD.unpack_from(write.data)
        if tag == 0 or write.data[:SECTOR] != sector_of(tag, sector):
            return False
        self._durable += 1
        return self._durable % self._lie_every == 0

    def _note(self, note):
        kind = note["kind"]
        if kind == "ready":
            self.is_ready = True
        elif kind == "volume":
            sizes = self.volumes.setdefault(note["name"], [None])
            sizes.append(note["size"])
        elif kind == "volume done":
            del self.volumes[note["name"]][:-1]
        elif kind == "begin":
            key = note["worker"], note["number"]
            self._begun[key] = note
            for sector in _sectors(note):
                self.tags.setdefault(sector, [NEVER_WRITTEN]).append((key, note["tag"]))
        elif kind == "durable":
            self._acknowledge((note["worker"], note["number"]))
        elif kind == "synced":
            keys = [key for key in self._begun if key[0] == note["worker"] and key[1] <= note["number"]]
            for key in keys:
                self._acknowledge(key)

    def _acknowledge(self, key):
        begun = self._begun.pop(key)
        for sector in _sectors(begun):
            # A later write of the sector may have been acknowledged before this one: then this one's tag is gone.
            if (key, begun["tag"]) in self.tags[sector]:
                del self.tags[sector][:self.tags[sector].index((key, begun["tag"]))]

    def write_images(self, names, survival, seed):
        """Makes a file of each disk as the cut leaves it."""
        draw, zeroes = random.Random(seed), bytes(64 << 10)
        for name, content in zip(names, self.disks, strict=True):
            with open(name, "wb") as file:
                file.truncate(len(content))
                for at in range(0, len(content), len(zeroes)):
                    if content[at:at + len(zeroes)] != zeroes:
                        file.seek(at)
                        file.write(content[at:at + len(zeroes)])
        for entry in self.pending.values():
            part = _survivors(entry.write.length // SECTOR, survival, draw)
            with open(names[entry.write.disk], "r+b") as file:
                file.seek(entry.write.offset + part.start * SECTOR)
                file.write(_bytes(entry.write)[part.start * SECTOR:part.stop * SECTOR])


def _bytes(write):
    return bytes(write.length) if write.data is None else write.data


def _sectors(note):
    return range(note["offset"] // SECTOR, (note["offset"] + note["length"]) // SECTOR)


def _survivors(sectors, survival, draw):
    """Which sectors of a write that is not durable are on the disk after the cut."""
    if survival == "all":
        return range(sectors)
    if survival == "half":
        return range(draw.randrange(sectors + 1))
    if survival == "any" and draw.random() < 0.5:
        first = 0 if draw.random() < 0.7 else draw.randrange(sectors)
        return range(first, sectors)
    return range(0)


def points(events, count, size):
    """The numbers of the events after which more is durable than before, once the disks are ready; and those among them
    at which a copy of the pool's table has just become durable, or is under way."""
    moment, found, at_table = Moment(count, size), [], []
    for number, event in enumerate(events):
        was_under_way = moment.writes_pool_table()
        if moment.advance(event) and moment.is_ready:
            found.append(number)
            if was_under_way:
                at_table.append(number)
    return found, at_table


class Replay:
    """What the release binaries make of the disks after a cut."""

    def __init__(self, directory, state, devices):
        """state: the daemon's state.json. devices: what it calls the disks, in their order."""
        self.directory = directory
        self.members = os.path.join(directory, "members")
        self.names = [os.path.join(self.members, f"{number}.img") for number in range(len(devices))]
        for device, name in zip(devices, self.names, strict=True):
            state = state.replace(f'"{device}"', f'"{name}"')
        self.state = state

    def judge(self, moment, survival, seed, missing=None):
        """All that is wrong after a cut at this moment; an empty text if nothing is. missing: a disk that is gone as well.
        Then sectors that were being written may be I/O errors: full stripes are logged without data (docs/raid.md)."""
        shutil.rmtree(self.members, ignore_errors=True)
        os.makedirs(self.members)
        moment.write_images(self.names, survival, seed)
        if missing is not None:
            os.unlink(self.names[missing])
        is_whole = missing is None
        check_array = self._check_array if is_whole else self._check_degraded_array
        steps = [self._assemble, check_array, lambda: self._read(moment, is_whole), self._check_pool, check_array]
        if is_whole:
            steps.append(lambda: raid_check(self._used()))
        wrong = []
        for step in steps:
            try:
                step()
            except (AssertionError, DaemonError, ServerError, OSError) as error:
                wrong.append(str(error) or repr(error))
        return "\n".join(wrong)

    def _assemble(self):
        self._run(paths.FREESTONE, "array", "assemble", "--run", "--name", ARRAY, "--scan", self.members)

    def _used(self):
        """The disks that were ever made members."""
        with_superblock = []
        for name in self.names:
            with open(name, "rb") as file:
                file.seek(4096)
                if any(file.read(4096)):
                    with_superblock.append(name)
        return with_superblock

    def _check_array(self):
        self._run(paths.FREESTONE, "array", "check", "--name", ARRAY, "--scan", self.members)

    def _check_degraded_array(self):
        """Bad blocks are the only reason not to be clean: of which, the volume tells."""
        command = [paths.FREESTONE, "array", "check", "--name", ARRAY, "--scan", self.members]
        done = self._try(*command)
        is_bad = " 0 rows different, 0 strips unreadable" in done.stdout and "bad blocks    0 ranges" not in done.stdout
        assert done.returncode == 0 or is_bad, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}"

    def _check_pool(self):
        self._run(paths.FREESTONE, "pool", "check", "--device", f"raid:name={ARRAY},scan={self.members},run=on")

    def _try(self, *command):
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
                              env={**os.environ, "XDG_RUNTIME_DIR": self.directory})

    def _run(self, *command):
        done = self._try(*command)
        assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}"
        return done.stdout

    def _read(self, moment, is_whole):
        """Starts the daemon, compares the volumes with what they must hold, and ends it. Volumes are whole MiB."""
        state = os.path.join(self.directory, "state")
        shutil.rmtree(state, ignore_errors=True)
        os.makedirs(state)
        with open(os.path.join(state, "state.json"), "w") as file:
            file.write(self.state)
        daemon = Freestoned(self.directory, "--scan", self.members, "--member-timeout", "0")
        if os.path.exists(daemon.path("freestoned.log")):
            os.unlink(daemon.path("freestoned.log"))
        try:
            daemon.start()
            daemon.wait_for("the array", lambda: [a for a in daemon.get("/v1/arrays") if a["state"] in ("optimal", "degraded")])
            sizes = {volume["name"]: volume["size_bytes"] for volume in daemon.get("/v1/volumes")}
            for name, allowed in moment.volumes.items():
                assert sizes.get(name) in allowed, f"volume {name}: size {sizes.get(name)}, expected one of {allowed}\n{daemon.log()}"
            self._compare(moment, self._read_volume(daemon, VOLUME, sizes[VOLUME]), is_whole)
            if OTHER in sizes:
                sectors = self._read_volume(daemon, OTHER, sizes[OTHER])
                wrong = [number for number, found in enumerate(sectors) if found is None or any(found)]
                assert not wrong, f"volume {OTHER} was never written: sectors {wrong[:9]} hold something, or are unreadable"
            daemon.stop()
            log = daemon.log()
            assert "panicked" not in log, log
        finally:
            daemon.close()

    def _read_volume(self, daemon, name, size):
        export = f"nbd-{name}"
        socket = daemon.path(f"{export}.sock")
        daemon.post("/v1/exports", {"name": export, "kind": "nbd", "volumes": [name], "read_only": True, "options": {"socket": socket}})
        sectors, step = [], 1 << 20
        for at in range(0, size, step):
            piece, = read_export(socket, [(at, step)])
            if piece is None:
                sectors += read_export(socket, [(sector, SECTOR) for sector in range(at, at + step, SECTOR)])
            else:
                sectors += [piece[sector:sector + SECTOR] for sector in range(0, step, SECTOR)]
        return sectors

    def _compare(self, moment, sectors, is_whole):
        wrong = []
        for sector, found in enumerate(sectors):
            tags = [tag for _, tag in moment.tags.get(sector, (NEVER_WRITTEN,))]
            if found is None:
                if is_whole or len(tags) == 1:
                    wrong.append(f"sector {sector} is unreadable, expected one of the tags {tags}")
            elif not any(found == sector_of(tag, sector) for tag in tags):
                wrong.append(f"sector {sector}: tag and sector {WORD.unpack_from(found)}, expected one of the tags {tags}")
        assert not wrong, f"{len(wrong)} sectors of volume {VOLUME} are wrong, the first: {wrong[0]}"


def spread(found, count):
    """At most `count` of the points, evenly spread, the last one among them."""
    if count >= len(found):
        return found
    return sorted({found[(i + 1) * len(found) // count - 1] for i in range(count)})


def replay(events, count, size, replayer, at, cut, lie_every=None):
    """Cuts the power at these points of the log. cut(n): how many writes survive the n-th cut, and the disk that is missing
    after it, or None. Returns what is wrong after which cut."""
    moment, wanted, cuts, wrong = Moment(count, size, lie_every), set(at), 0, []
    for number, event in enumerate(events):
        moment.advance(event)
        if number not in wanted:
            continue
        survival, missing = cut(cuts)
        cuts += 1
        problem = replayer.judge(moment, survival, number, missing)
        if problem:
            gone = "" if missing is None else f", disk {missing} is gone"
            wrong.append(f"event {number}, {survival} of {len(moment.pending)} pending writes survive{gone}: {problem}")
    return wrong

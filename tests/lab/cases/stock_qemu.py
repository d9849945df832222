"""A stock QEMU, driven by qtest: negotiation, reconnection, memory and migration of its vhost-user front end, without a guest."""

import os
import struct

from lab import needs_freestone
from qtest import (
    F_DISCARD, F_EVENT_IDX, F_FLUSH, F_INDIRECT, F_MQ, F_RING_PACKED, F_VERSION_1, F_WRITE_ZEROES, Machine, VirtioBlk)
from server import Server
from vhost_ring import FLUSH, GET_ID, IN, OK, OUT, SECTOR, UNSUPP, Request, header
from vhost_user_front import eventually
from workload import KILLS, MIB

IMAGE_MIB = 32
REQUESTS = 32
ROUNDS = 5
PARTS = 8  # of the disk, which differ


def a_stock_qemu_negotiates_and_each_request_is_answered(lab):
    _serve(lab, queues=2)
    with _machine(lab, queues=2) as machine:
        disk = VirtioBlk(machine, refused=0 if lab.kind is Server else F_RING_PACKED)
        expected = F_FLUSH | F_MQ | F_DISCARD | F_WRITE_ZEROES | F_INDIRECT | F_EVENT_IDX | F_VERSION_1
        assert disk.features & expected == expected, f"features {disk.features:#x}"
        disk = VirtioBlk(machine)  # once more, after a reset
        assert disk.capacity() == IMAGE_MIB * MIB // SECTOR
        for queue in (0, 1):
            data = os.urandom(8192)
            assert disk.run(queue, OUT, 16 + queue * 16, data) == (OK, 1, b"")
            assert disk.run(queue, FLUSH) == (OK, 1, b"")
            with open(lab.image, "rb") as image:
                assert os.pread(image.fileno(), 8192, 8192 + queue * 8192) == data
            assert disk.run(1 - queue, IN, 16 + queue * 16, size=8192, cuts=[512, 1024, 6656], indirect=True) == (OK, 8193, data)
        assert disk.run(0, GET_ID, size=20)[:2] == (OK, 21)
        assert disk.run(1, 77)[0] == UNSUPP


@needs_freestone
def a_stock_qemu_lives_through_kills_with_each_request_complete_once(lab):
    """Requests are in flight, or still to be taken, at each kill of the server."""
    _serve(lab, queues=2)
    with _machine(lab, queues=2) as machine:
        disk = VirtioBlk(machine)
        free = machine.memory.free
        for kill in range(2 * KILLS):
            machine.memory.free = free
            offered = [disk.offer(queue, REQUESTS, OUT, _first(queue), fill=lambda i: _fill(kill, queue, i)) for queue in (0, 1)]
            lab.server.kill()
            lab.server.start()
            for queue in (0, 1):
                disk.take(queue, offered[queue])
            read = [disk.offer(queue, REQUESTS, IN, _first(queue)) for queue in (0, 1)]
            for queue in (0, 1):
                disk.take(queue, read[queue])
                for i, request in enumerate(read[queue]):
                    assert request.content() == bytes([_fill(kill, queue, i)]) * SECTOR, f"kill {kill}, queue {queue}, sector {i}"


def memory_that_is_plugged_in_takes_requests_of_a_running_ring(lab):
    _serve(lab)
    with _machine(lab) as machine:
        disk = VirtioBlk(machine)
        data = os.urandom(65536)
        assert disk.run(0, OUT, 0, data)[0] == OK
        module = machine.plug_memory(128 * MIB)
        place = module.base + 64 * MIB
        disk.read_into(0, place, 0, len(data))
        assert module.read(place, len(data)) == data


@needs_freestone
def a_new_capacity_reaches_a_stock_qemu(lab):
    _serve(lab)
    with _machine(lab) as machine:
        disk = VirtioBlk(machine)
        os.truncate(lab.image, 2 * IMAGE_MIB * MIB)
        lab.server.resized()
        eventually("the new capacity", lambda: disk.capacity() == 2 * IMAGE_MIB * MIB // SECTOR)
        assert disk.run(0, OUT, disk.capacity() - 8, bytes(4096))[0] == OK


@needs_freestone
def a_machine_migrates_under_load_with_what_the_server_wrote_to_its_memory(lab):
    _serve(lab, queues=2, server=_TwoExports)
    uri = f"unix:{lab.scratch()}/migration"
    with _machine(lab, queues=2) as source, _machine(lab, lab.server.second_socket, queues=2, incoming=uri) as target:
        disk = VirtioBlk(source)
        for part in range(PARTS):
            disk.take(0, disk.offer(0, REQUESTS, OUT, _part(part), 4096, fill=lambda i: _fill(part, 0, i)))
        # Each round reads another part of the disk to the same memory, whose pages the device alone writes: each page that
        # the dirty log misses is stale on the target.
        reads = [[Request(ring, IN, size=4096) for _ in range(REQUESTS)] for ring in disk.rings]
        for ring in disk.rings:
            ring.chains.clear()  # they are offered again and again
        source.memory.machine = source
        # The first pass ends soon, and the second one not before it is allowed to.
        parameters = lambda **values: source.qmp.run("migrate-set-parameters", **{name.replace("_", "-"): value for name, value in values.items()})
        parameters(max_bandwidth=256 << 10, downtime_limit=1)
        source.qmp.run("migrate", uri=uri)
        rounds = late = 0
        while _migration(source)["status"] != "completed":
            if late == ROUNDS:
                parameters(max_bandwidth=1 << 30, downtime_limit=2000)
                continue
            late += _migration(source).get("ram", {}).get("dirty-sync-count", 0) > 1
            for ring, requests in zip(disk.rings, reads):
                for i, request in enumerate(requests):
                    source.memory.write(request.header, header(IN, _part(rounds % PARTS) + i * 4096 // SECTOR))
                ring.offer(*(request.head for request in requests))
                ring.notify()
                _wait_or_leave(ring, REQUESTS, source)
            rounds += 1
        assert late, f"none of {rounds} rounds was after the first pass"
        eventually("the target runs", lambda: target.qmp.run("query-status")["status"] == "running")
        for queue, ring in enumerate(disk.rings):
            index = lambda area: struct.unpack("<H", target.memory.read(area + 2, 2))[0]
            eventually(f"queue {queue}: all requests are used on the target", lambda: index(ring.used) == index(ring.avail))
            arrived = index(ring.avail) // REQUESTS - (PARTS if queue == 0 else 0)
            assert 0 < arrived <= rounds, f"queue {queue}: {arrived} of {rounds} rounds reached the target"
            for i, request in enumerate(reads[queue]):
                content = target.memory.read(request.data, 4096)
                assert content == bytes([_fill((arrived - 1) % PARTS, 0, i)]) * 4096, f"queue {queue}, request {i}: {content[:1]}"
        return f"{rounds} rounds, {late} of them after the first pass"


def _migration(machine):
    """The state of its migration; raises when that has failed."""
    state = machine.qmp.run("query-migrate")
    assert state.get("status") != "failed", state
    return state


def _wait_or_leave(ring, count, machine):
    """Waits for completions, for as long as the machine has not left."""
    taken = len(ring.take())
    while taken < count and _migration(machine)["status"] != "completed":
        taken += len(ring.take())


class _TwoExports(Server):
    """Of one disk: an export serves one machine at a time, and while one migrates, both are connected."""

    @property
    def second_socket(self):
        return os.path.join(self.directory, "second.sock")

    def command(self):
        return [*super().command(), "--export", f"vhost-user-blk:socket={self.second_socket},queues={self.queues}"]


def _serve(lab, queues=1, server=None):
    lab.make_image(IMAGE_MIB)
    lab.serve((server or lab.kind)(lab.image, queues, os.path.join(lab.directory, "server.log")))


def _machine(lab, vhost_user=None, **options):
    machine = Machine(lab.directory, vhost_user or lab.server.socket, **options)
    lab.parts.append(machine)
    return machine


def _first(queue):
    """The first sector of a queue's own part of the disk."""
    return 2048 * (1 + queue)


def _part(part):
    """The first sector of a part of the disk."""
    return part * REQUESTS * 4096 // SECTOR


def _fill(kill, queue, i):
    return (17 * kill + 101 * queue + i) % 251 + 1

"""One image that two servers export over NVMe/TCP, as docs/beyond-one-host.md has it: one is active, one a standby."""
import signal
import threading
import time

from cluster import free_ports
from guest import wait_for_requests  # and the path to the lab
from vm import Guest
from workload import ENOUGH, fio_verify_again, fio_verify_until_enough, kernel_errors

NQN = "nqn.2014-08.org.example:vm1"
UUID = "6f1c1d66-4a1f-4a6e-9d0c-6f0f3f1d2b11"
HOST_ID = "4c1d5d0e-6b8f-4d68-8a0a-0d0e6a1b2c3d"
HOST_NQN = f"nqn.2014-08.org.nvmexpress:uuid:{HOST_ID}"
CONTROLLER_IDS = ("1-32000", "32001-65000")
# After which Ceph takes a silent client for dead; its default is 30 s.
WATCH_TIMEOUT_S = 5
TAKEOVER_TIMEOUT_S = 60
ACTIVE = "this host is active"
# The host, as QEMU's user network shows it to a guest.
GATEWAY, GUEST_ADDRESS = "10.0.2.2", "10.0.2.15/24"


class Pair:
    """Two servers of one image. Ceph's timeout is shorter while there is a pair."""

    lock, count = threading.Lock(), 0

    def __init__(self, lab, image):
        self.lab, self.image, self.ports = lab, lab.image(image), free_ports(2)
        self.servers = [None, None]
        self.use_timeout(1, "set", "osd", "osd_client_watch_timeout", str(WATCH_TIMEOUT_S))

    def use_timeout(self, count, *change):
        with Pair.lock:
            Pair.count += count
            if Pair.count == (count + 1) // 2:  # the first comes, or the last goes
                self.lab.cluster.call("ceph", "config", *change)

    def start(self, place):
        listen = f"listen=127.0.0.1:{self.ports[place]},nqn={NQN},uuid={UUID},controller-ids={CONTROLLER_IDS[place]}"
        self.servers[place] = self.lab.server(self.lab.device(self.image, ",standby=on,id=vm1"), export=f"nvme-tcp:{listen}")
        return self.servers[place]

    def address(self, place):
        return f"nvme-tcp:address=127.0.0.1:{self.ports[place]},nqn={NQN},kato=0"

    def __enter__(self):
        try:
            self.start(0)
            assert "512-byte blocks, active" in self.servers[0].text()
            self.start(1)
            assert "512-byte blocks, standby" in self.servers[1].text()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for server in filter(None, self.servers):
            server.process.send_signal(signal.SIGCONT)
            server.kill()
            server.end()
        self.use_timeout(-1, "rm", "osd", "osd_client_watch_timeout")


def becomes_active(server):
    """Waits until a standby has taken over; returns the seconds that took."""
    started = time.monotonic()
    server.wait_until(lambda: ACTIVE in server.text(), TAKEOVER_TIMEOUT_S)
    return time.monotonic() - started


def is_ended(server):
    """Waits for a server that was shut out, which ends."""
    assert server.process.wait(TAKEOVER_TIMEOUT_S) == 1, server.text()
    assert "another host has taken it over" in server.text(), server.text()


def a_standby_takes_over_from_a_killed_and_from_a_stopped_server(lab):
    with Pair(lab, "pair") as pair:
        first, second = pair.servers
        time.sleep(WATCH_TIMEOUT_S)
        assert ACTIVE not in second.text(), "a living owner lost its lock"
        first.kill()
        after_kill = becomes_active(second)
        # The dead server comes back as the standby; an orderly end hands the lock over.
        first.end()
        first = pair.start(0)
        second.end()
        pair.servers[1] = None
        after_stop = becomes_active(first)
    return f"after kill -9: {after_kill:.1f} s (Ceph's timeout is {WATCH_TIMEOUT_S} s here); after SIGTERM: {after_stop:.1f} s"


def slow_writes_of_a_server_that_was_taken_for_dead_do_not_land(lab):
    """The first server is stopped under load, and resumed with its clients' writes still in its sockets."""
    with Pair(lab, "late") as pair:
        first, second = pair.servers
        write = ["--ioengine=nbd", "--rw=randwrite", "--size=8m", "--bs=4k", "--iodepth=32", "--verify=crc32c", "--verify_fatal=1"]
        with lab.bridge(pair.address(0)) as client:
            load = lab.fio_start(*write, f"--uri={client.uri}", "--time_based", "--runtime=60", "--randseed=5")
            try:
                time.sleep(2)
                assert load.poll() is None, "no load"
                first.process.send_signal(signal.SIGSTOP)
                took = becomes_active(second)
                with lab.bridge(pair.address(1)) as other:
                    lab.fio(*write, f"--uri={other.uri}", "--randseed=9")
                    first.process.send_signal(signal.SIGCONT)
                    is_ended(first)
                    lab.fio(*write, f"--uri={other.uri}", "--randseed=9", "--verify_only=1")
            finally:
                load.kill()
                load.wait()
            client.kill()  # its target is gone
    return f"the standby was active after {took:.1f} s"


def slow_a_guest_works_while_the_host_that_serves_its_disk_dies(lab):
    network = ["-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net"]
    directory = lab.cluster.directory / "guest"
    directory.mkdir()
    with Pair(lab, "guest") as pair, Guest(cpus=2, directory=str(directory), qemu_arguments=network) as guest:
        guest.sh(f"modprobe virtio_net; ip link set eth0 up; ip addr add {GUEST_ADDRESS} dev eth0; modprobe nvme-tcp")
        connect = f"nvme connect -t tcp -a {GATEWAY} -n {NQN} --hostnqn {HOST_NQN} --hostid {HOST_ID}"
        options = "-i 2 --keep-alive-tmo 3 --reconnect-delay 1 --ctrl-loss-tmo 600"
        for port in pair.ports:
            guest.sh(f"{connect} -s {port} {options}")
        path_name = lambda path: f"nvme0c{path}n1"
        states = lambda: [guest.sh(f"cat /sys/block/{path_name(path)}/ana_state").strip() for path in (0, 1)]
        assert states() == ["optimized", "inaccessible"], states()
        disk = guest.sh("for i in $(seq 100); do ls -d /dev/nvme*n1 && exit 0; sleep 0.1; done; exit 1").split()
        assert disk == ["/dev/nvme0n1"], f"not one disk with two paths: {disk}"
        load = guest.start("load", "trap '' PIPE; " + fio_verify_until_enough(disk[0], "4m", "--rate_iops=200"))
        took = []
        for active in 0, 1:
            standby = 1 - active
            wait_for_requests(guest, load, path_name(active))
            pair.servers[active].kill()
            took.append(becomes_active(pair.servers[standby]))
            wait_for_requests(guest, load, path_name(standby))
            pair.servers[active].end()
            pair.start(active)
            guest.sh(f"for i in $(seq 600); do [ $(cat /sys/class/nvme/nvme{active}/state) = live ] && exit 0; sleep 0.1; done; exit 1")
        guest.sh(f"touch {ENOUGH}")
        load.wait(timeout_s=300)
        # Only Ceph keeps data: a server without a history reads it.
        guest.sh(fio_verify_again(disk[0], "4m"))
        errors = kernel_errors(guest)
        assert not errors, errors
        guest.sh(f"nvme disconnect -n {NQN}")
    return "active after " + " and ".join(f"{seconds:.1f} s" for seconds in took)


CASES = [
    a_standby_takes_over_from_a_killed_and_from_a_stopped_server,
    slow_writes_of_a_server_that_was_taken_for_dead_do_not_land,
    slow_a_guest_works_while_the_host_that_serves_its_disk_dies,
]

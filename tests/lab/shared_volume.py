"""Two guests that share a disk: `freestone serve` on the host exports it over NVMe/TCP with reservations, each guest is a
host with a name and an identifier of its own, and a network connects them.

    server, (one, two) = share(lab, size_mib=256)
    one.guest.sh("…"); one.disk          # /dev/nvme0n1 is the same disk in both
    server.kill(); server.start()        # both reconnect
    one.reservation()                    # the report of the target
"""

import json
import os
import subprocess

import paths
from freestoned import free_port
from server import Server
from vm import HOST_ADDRESS, Guest
from workload import MIB

NQN = "nqn.2014-08.org.example:shared"
MEMORY_MIB = 1024
# Emulated hosts on a busy machine are silent for long.
CONNECT_OPTIONS = "-i 2 --keep-alive-tmo 120 --reconnect-delay 1 --ctrl-loss-tmo 1800"
RESERVATION_CONFLICT = "Invalid exchange"  # EBADE
PROGRAMS = os.path.join(paths.LAB, "shared-volumes", "root")


class SharedServer(Server):
    """The export on a file, slow enough that every kill finds commands on their way. Logs each change of reservations."""

    environment = {**os.environ, "FREESTONE_LOG": "info,exports=debug"}

    def __init__(self, lab):
        super().__init__(lab.image, log=os.path.join(lab.directory, "server.log"))
        self.reservations = os.path.join(self.directory, "reservations")
        self.port = free_port()

    def command(self):
        return [
            paths.FREESTONE, "serve",
            "--device", self.device_option(), "--layer", "fault:op=read+write,delay-us=10000",
            "--export", f"nvme-tcp:listen=127.0.0.1:{self.port},nqn={NQN},reservations={self.reservations}",
            "--cores", self.cores,
        ]

    def grow(self, size_mib):
        os.truncate(self.image, size_mib * MIB)
        self.resized()

    def changes(self):
        """The lines of the log that report changes of reservations."""
        with open(self.log, encoding="utf-8") as log:
            return [line for line in log if "reservations changed" in line]


class Sharer:
    """A guest that is connected to the disk. number: 1 or 2; the first makes the network that the second joins."""

    disk = "/dev/nvme0n1"

    def __init__(self, lab, server, network, number, kernel):
        self.number, self.address, self.kernel = number, f"10.8.0.{number}", kernel
        role = "server=on" if number == 1 else "server=off,reconnect-ms=200"
        self.guest = lab.start(Guest(directory=os.path.join(lab.directory, str(number)), memory_mib=MEMORY_MIB, kernel=kernel, qemu_arguments=[
            "-netdev", "user,id=host", "-device", "virtio-net-pci,netdev=host,romfile=",
            "-netdev", f"stream,id=peer,{role},addr.type=unix,addr.path={network}",
            "-device", f"virtio-net-pci,netdev=peer,romfile=,mac=52:54:00:08:00:0{number}",
        ]))
        lab.parts.append(self.guest)
        self.guest.modprobe("virtio_net", "nvme-tcp", "configfs")
        self.guest.sh(f"""
            cp -rsn {PROGRAMS}/. /
            hostname host{number}; printf '10.8.0.1 host1\\n10.8.0.2 host2\\n' >>/etc/hosts
            ip link set eth0 up; ip addr add 10.0.2.15/24 dev eth0
            ip link set eth1 up; ip addr add {self.address}/24 dev eth1
            mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config""")
        identity = f"4c1d5d0e-6b8f-4d68-8a0a-0d0e6a1b2c0{number}"
        self.guest.sh(f"nvme connect -t tcp -a {HOST_ADDRESS} -s {server.port} -n {NQN} {CONNECT_OPTIONS}"
                      f" --hostnqn nqn.2014-08.org.nvmexpress:uuid:{identity} --hostid {identity}")
        self.until(f"[ -b {self.disk} ]")

    def until(self, condition, timeout_s=300):
        """Wait until a condition of the shell holds."""
        self.guest.sh(f"until {condition}; do sleep 0.2; done", timeout_s)

    def reservation(self):
        """The reservation and the registrations: {key: whether its host holds the reservation}."""
        report = json.loads(self.guest.sh(f"nvme resv-report {self.disk} --eds -o json"))
        registrants = {entry["rkey"]: entry["rcsts"] == 1 for entry in report["regctlext"]}
        assert len(registrants) == report["regctl"], report
        return report["rtype"], report["ptpls"], registrants

    def sectors(self):
        """How many sectors of the disk this host has read and written (Documentation/block/stat.rst)."""
        words = self.guest.sh(f"cat /sys/block/{os.path.basename(self.disk)}/stat").split()
        return int(words[2]), int(words[6])

    def drop_caches(self):
        self.guest.sh("sync; echo 3 >/proc/sys/vm/drop_caches")


def share(lab, size_mib, kernels=(paths.KERNEL, paths.KERNEL)):
    """Serve a new disk and boot two guests that are connected to it. Returns the server and the guests."""
    subprocess.run([os.path.join(paths.HERE, "shared-volume-programs")], check=True)
    lab.make_image(size_mib)
    server = SharedServer(lab)
    lab.serve(server)
    network = os.path.join(lab.scratch(), "network.sock")
    return server, [Sharer(lab, server, network, number, kernel) for number, kernel in enumerate(kernels, 1)]

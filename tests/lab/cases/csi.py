"""freestone-csi in a guest, with the disks and mounts of the guest's kernel (tests/csi/real_node.py); and two guests as the nodes
of a cluster, with the daemon and the controller on the host."""

import json
import os
import subprocess

import paths
from freestoned import MIB, Freestoned, GuestDaemon, free_port
from lab import needs_freestone
from paths import die_with_parent
from runner import nightly
from vm import HOST_ADDRESS, NETWORK, Guest

CSI = os.path.join(paths.REPO, "tests", "csi")
FREESTONE_CSI = os.environ.get("FREESTONE_CSI", os.path.join(os.path.dirname(paths.FREESTONE), "freestone-csi"))
PYTHON = os.path.join(paths.REPO, "target", "csi", "venv", "bin", "python")
DISK = "/dev/shm/disk"
CALL = os.path.join(CSI, "call.py")
STEPS_TIMEOUT_S = 800
SANITY_TIMEOUT_S = 3300
# A node that has lost its access gives up soon.
PARAMETERS = {"ctrl-loss-tmo": "5", "fast-io-fail-tmo": "2", "nr-io-queues": "1"}
FILES = {"mount": {"fs_type": "ext4"}, "access_mode": {"mode": "SINGLE_NODE_WRITER"}}
RAW = {"block": {}, "access_mode": {"mode": "SINGLE_NODE_WRITER"}}
RAW_MIB = 8
AT_ONCE = 8  # volumes of a node


@needs_freestone
def volumes_over_nvme_tcp_are_mounted_grown_and_given_up(lab):
    guest, _ = _boot(lab, "nvme-tcp")
    said = _steps(guest, "nvme-tcp", "$(cat /run/daemon.pid)")
    assert "unstaged" in said, said
    # The kernel says which data it could not write to the daemon that was killed.
    guest.sh("dmesg -C")
    return said.splitlines()[0]


@needs_freestone
@nightly
def volumes_over_ublk_are_mounted_grown_and_given_up(lab):
    # Older kernels do not resize such disks.
    guest, daemon = _boot(lab, "ublk_drv", kernel=paths.NEW_KERNEL)
    _steps(guest, "ublk")
    daemon.end()


@needs_freestone
def csi_sanity_passes_over_nvme_tcp(lab):
    return _sanity(lab, "nvme_tcp", "nvme-tcp")


@needs_freestone
@nightly
def csi_sanity_passes_over_ublk(lab):
    return _sanity(lab, "ublk_drv", "ublk", kernel=paths.NEW_KERNEL)


def _sanity(lab, module, kind, **options):
    guest, daemon = _boot(lab, module, **options)
    said = _steps(guest, kind, "sanity", SANITY_TIMEOUT_S)
    daemon.end()
    return ", ".join(line for line in said.splitlines() if line.startswith("csi-sanity"))


@needs_freestone
@nightly
def a_direct_volume_of_kata_is_formatted_and_grown(lab):
    guest, daemon = _boot(lab, "nvme-tcp")
    _steps(guest, "nvme-tcp", "direct")
    daemon.end()


def _boot(lab, module, **options):
    subprocess.run([os.path.join(CSI, "setup")], check=True)
    guest = lab.boot_alone(cpus=2, **options)
    guest.modprobe(module, "ext4", "xfs")
    guest.sh(f"ip link set lo up; truncate -s 16G {DISK}")
    daemon = GuestDaemon(guest)
    daemon.start()
    daemon.cli(f"device create disk {DISK}")
    return guest, daemon


def _steps(guest, kind, more="", timeout_s=STEPS_TIMEOUT_S):
    said = guest.sh(f"FREESTONE_CSI={FREESTONE_CSI} {PYTHON} {CSI}/real_node.py {kind} {GuestDaemon.DIRECTORY}/d.sock /run/csi {more} 2>&1",
                    timeout_s=timeout_s, check=False)
    assert "passed" in said[1].splitlines()[-1:], said[1]
    return said[1]


@needs_freestone
def a_node_that_is_frozen_or_cut_off_writes_nothing_once_another_has_its_volumes(lab):
    cluster, a, b = _cluster(lab)
    files, raw = cluster.create("files", FILES, 64 * MIB), cluster.create("raw", RAW, RAW_MIB * MIB)
    volumes = [files, raw]
    for volume in volumes:
        a.attach(volume)
    writers = a.write(files, raw)
    a.guest.qmp("stop")
    for volume in volumes:
        [refusal] = cluster.call([["ControllerPublishVolume", b.publication(volume)]], check=False)
        assert refusal["code"] == "FAILED_PRECONDITION" and a.nqn in refusal["message"], refusal
        a.unpublish(volume)
        b.attach(volume)
    b.fill(files, raw)
    a.guest.qmp("cont")
    _each_ends(writers)
    b.has_its_own(files, raw)
    a.give_up(volumes)

    # The same the other way, by the network: b does not notice that it has lost its access.
    writers = b.write(files, raw)
    b.guest.qmp("set_link", name="nic", up=False)
    for volume in volumes:
        b.unpublish(volume)
        a.attach(volume)
    a.fill(files, raw)
    b.guest.qmp("set_link", name="nic", up=True)
    _each_ends(writers)
    a.has_its_own(files, raw)
    assert a.guest.sh(f"cat {files.target}/b") == "b" * 100  # of the time before
    b.give_up(volumes)
    for volume in volumes:
        a.detach(volume)
        a.unpublish(volume)
    a.is_clean()
    cluster.call([["DeleteVolume", {"volume_id": volume.id}] for volume in volumes])
    assert cluster.daemon.get("/v1/volumes") == cluster.daemon.get("/v1/exports") == []
    cluster.stop()


@needs_freestone
@nightly
def volumes_of_a_node_outlast_kills_of_the_driver_and_the_daemon(lab):
    cluster, node = _cluster(lab, nodes="a")
    parameters = {**PARAMETERS, "ctrl-loss-tmo": "-1", "fast-io-fail-tmo": "-1"}
    volumes = [cluster.create(f"pvc-{place}", FILES, 16 * MIB, parameters) for place in range(AT_ONCE)]
    for place, volume in enumerate(volumes):
        node.attach(volume)
        if place == AT_ONCE // 2:
            cluster.restart_controller()
            node.restart()
            cluster.daemon.kill()
            cluster.daemon.start()
    node.guest.sh(" && ".join(f"echo {volume.id} >{volume.target}/id" for volume in volumes) + " && sync")
    cluster.daemon.kill()
    cluster.daemon.start()
    node.guest.sh("echo 3 >/proc/sys/vm/drop_caches", timeout_s=STEPS_TIMEOUT_S)
    said = node.guest.sh("cat " + " ".join(f"{volume.target}/id" for volume in volumes), timeout_s=STEPS_TIMEOUT_S)
    assert said.split() == [volume.id for volume in volumes], said
    node.restart()
    for volume in volumes:
        node.detach(volume)
        node.unpublish(volume)
    node.is_clean()
    cluster.call([["DeleteVolume", {"volume_id": volume.id}] for volume in volumes])
    assert cluster.daemon.get("/v1/volumes") == []
    cluster.stop()
    return f"{AT_ONCE} volumes"


def _cluster(lab, nodes="ab"):
    """A daemon and a controller on the host, and nodes in guests."""
    subprocess.run([os.path.join(CSI, "setup")], check=True)
    cluster = _Cluster(lab)
    return (cluster, *(_Node(lab, cluster, name) for name in nodes))


def _each_ends(writers):
    for writer in writers:
        said = writer.wait(STEPS_TIMEOUT_S)
        assert "a write has failed" in said, said


def _checked(answers, check=True):
    assert not check or not any("code" in answer for answer in answers), answers
    return answers


class _Volume:
    def __init__(self, name, identity, capability, context):
        self.name, self.id, self.capability, self.context = name, identity, capability, context
        self.staging, self.target = (f"/run/csi/{name}-{kind}" for kind in ("staging", "target"))


class _Cluster:
    """A daemon whose portal guests reach, and a controller of its volumes."""

    def __init__(self, lab):
        self.directory = lab.scratch()
        os.makedirs(lab.directory, exist_ok=True)
        self.log = os.path.join(lab.directory, "controller.log")
        self.socket = os.path.join(self.directory, "csi.sock")
        self.daemon = Freestoned(os.path.join(self.directory, "d"))
        lab.callback(self.daemon.close)
        # Its logs() are printed when the test fails.
        lab.parts.append(self)
        self.daemon.start()
        port = free_port()
        self.daemon.post("/v1/devices", {"name": "disk", "spec": self.daemon.file("disk", 1 << 30)})
        self.daemon.post("/v1/portals", {"name": "net", "listen": [f"127.0.0.1:{port}"]})
        self.backends = os.path.join(self.directory, "backends.toml")
        with open(self.backends, "w", encoding="utf-8") as file:
            file.write(f'[[backend]]\nname = "rack1"\nurl = "unix://{self.daemon.socket}"\nbacking = "disk"\n'
                       f'portal = "net"\naddresses = ["{HOST_ADDRESS}:{port}"]\n')
        self.start_controller()
        lab.callback(self._end)

    def start_controller(self):
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [FREESTONE_CSI, "--mode", "controller", "--endpoint", f"unix://{self.socket}", "--backends", self.backends],
                stdin=subprocess.DEVNULL, stderr=log, preexec_fn=die_with_parent)

    def restart_controller(self):
        self._end()
        self.start_controller()

    def stop(self):
        self.process.terminate()
        assert self.process.wait(timeout=STEPS_TIMEOUT_S) == 0
        self.daemon.stop()

    def logs(self):
        return f"--- controller\n{paths.tail(self.log, 30)}\n--- daemon\n{self.daemon.log()}\n"

    def _end(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def call(self, calls, check=True):
        """The answers of calls to the controller."""
        done = subprocess.run([PYTHON, CALL, self.socket], input=json.dumps(calls), capture_output=True, text=True, timeout=STEPS_TIMEOUT_S)
        assert done.returncode == 0, done.stderr
        return _checked(json.loads(done.stdout), check)

    def create(self, name, capability, size, parameters=None):
        fields = {"name": name, "volume_capabilities": [capability], "parameters": parameters or PARAMETERS,
                  "capacity_range": {"required_bytes": size}}
        [answer] = self.call([["CreateVolume", fields]])
        volume = answer["volume"]
        return _Volume(name, volume["volume_id"], capability, volume["volume_context"])


class _Node:
    """A guest with the node of the driver."""

    def __init__(self, lab, cluster, name):
        self.cluster, self.name, self.nqn = cluster, name, f"nqn.2014-08.org.example:{name}"
        self.id = json.dumps({"n": name, "q": self.nqn})
        self.guest = lab.start(Guest(directory=os.path.join(lab.directory, name), qemu_arguments=NETWORK))
        lab.parts.append(self.guest)
        self.guest.modprobe("virtio_net", "nvme-tcp", "ext4")
        self.guest.sh("mkdir -p /run/csi; ip link set eth0 up; ip addr add 10.0.2.15/24 dev eth0")
        self.start()

    def start(self):
        self.guest.start("csi", f"echo $BASHPID >/run/csi/pid; exec {FREESTONE_CSI} --mode node --endpoint unix:///run/csi/csi.sock"
                                f" --node-id {self.name} --host-nqn {self.nqn} --state-dir /run/csi/state")

    def restart(self):
        self.guest.sh("pid=$(cat /run/csi/pid); kill -KILL $pid; while kill -0 $pid 2>/dev/null; do sleep 0.05; done")
        self.start()

    def call(self, calls):
        """The answers of calls to the node."""
        script = f"{PYTHON} {CALL} /run/csi/csi.sock <<'CALLS'\n{json.dumps(calls)}\nCALLS"
        return _checked(json.loads(self.guest.sh(script, timeout_s=STEPS_TIMEOUT_S)))

    def publication(self, volume):
        return {"volume_id": volume.id, "node_id": self.id, "volume_capability": volume.capability}

    def unpublish(self, volume):
        self.cluster.call([["ControllerUnpublishVolume", {"volume_id": volume.id, "node_id": self.id}]])

    def attach(self, volume):
        """Publish a volume to this node, stage it and publish it to a pod."""
        [answer] = self.cluster.call([["ControllerPublishVolume", self.publication(volume)]])
        fields = {"volume_id": volume.id, "publish_context": answer["publish_context"], "volume_context": volume.context,
                  "volume_capability": volume.capability, "staging_target_path": volume.staging}
        self.call([["NodeStageVolume", fields], ["NodePublishVolume", {**fields, "target_path": volume.target}]])

    def detach(self, volume):
        self.call([["NodeUnpublishVolume", {"volume_id": volume.id, "target_path": volume.target}],
                   ["NodeUnstageVolume", {"volume_id": volume.id, "staging_target_path": volume.staging}]])

    def write(self, files, raw):
        """Begin to write to both volumes until a write fails; returns the jobs, of which each has written all once."""
        places = {"files": f"{files.target}/busy", "raw": raw.target}
        writers = [self.guest.start(f"write-{name}", f"while {self._pattern(path)}; do touch /run/wrote-{name}; done; echo a write has failed")
                   for name, path in places.items()]
        self.guest.sh("until [ -e /run/wrote-files -a -e /run/wrote-raw ]; do sleep 0.1; done", timeout_s=STEPS_TIMEOUT_S)
        return writers

    def fill(self, files, raw):
        """Write this node's pattern to both volumes."""
        self.guest.sh(f"printf '%0100d' 0 | tr 0 {self.name} >{files.target}/{self.name}; sync -f {files.target}; {self._pattern(raw.target)}",
                      timeout_s=STEPS_TIMEOUT_S)

    def _pattern(self, path):
        zeroes = r"'\0'"
        return f"tr {zeroes} {self.name} </dev/zero | dd of={path} bs=64k count={RAW_MIB * 16} iflag=fullblock oflag=direct conv=notrunc"

    def has_its_own(self, files, raw):
        """Both volumes have what this node wrote last, and the file system is whole."""
        self.guest.sh("echo 3 >/proc/sys/vm/drop_caches")
        assert self.guest.sh(f"cat {files.target}/{self.name}") == self.name * 100
        others = self.guest.sh(f"dd if={raw.target} bs=64k iflag=direct status=none | tr -d {self.name} | wc -c", timeout_s=STEPS_TIMEOUT_S)
        assert others.strip() == "0", f"{others} bytes of another node"
        self.guest.sh(f"touch {files.target}/alive && sync -f {files.target}")

    def give_up(self, volumes):
        """The node cleans up after volumes that it has lost."""
        for volume in volumes:
            self.detach(volume)
        self.is_clean()
        # The kernel says which data it could not write.
        self.guest.sh("dmesg -C")

    def is_clean(self):
        left = self.guest.sh("ls /sys/class/nvme; ls /run/csi/state; grep /run/csi /proc/mounts || true")
        assert not left.strip(), left

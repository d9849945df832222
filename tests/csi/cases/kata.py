"""Direct volumes of Kata: the file that Kata's runtime reads, and the socket that its VMM opens. No Kata runs here."""

import base64
import hashlib
import json
import os
import shutil
import socket
import stat
import subprocess

import paths
from driver import SINGLE_WRITER, WRITER, Driver, block, mount
from freestoned import MIB

CLASS = {"node-backend": "kata", "nr-io-queues": "2"}
BENCH_TIMEOUT_S = 120  # bounds failures alone


class Direct:
    """A volume of a class for Kata, and the calls for it in their order."""

    def __init__(self, subject):
        self.daemon = subject.daemon()
        self.directory = os.path.join(subject.scratch, "direct-volumes")
        self.driver = subject.driver([Driver.backend(self.daemon)], "--socket", self.daemon.socket, "--kata-dir", self.directory)
        self.staging, self.target = self.driver.path("staging"), self.driver.path("target~?~")
        made = self.driver.call("CreateVolume", name="pvc-1", volume_capabilities=[mount(SINGLE_WRITER)], parameters=CLASS,
                                capacity_range={"required_bytes": 64 * MIB}).volume
        self.id, self.context = made.volume_id, made.volume_context
        self.node = self.driver.call("NodeGetInfo").node_id
        # What Kata makes of the path.
        self.place = os.path.join(self.directory, base64.urlsafe_b64encode(self.target.encode()).decode())
        self.file = os.path.join(self.place, "mountInfo.json")
        self.export = f"csi-kata-{self.id.partition('/')[2]}"

    def publish_to_node(self):
        answer = self.driver.call("ControllerPublishVolume", volume_id=self.id, node_id=self.node, volume_context=self.context,
                                  volume_capability=mount(SINGLE_WRITER))
        self.fields = {"volume_id": self.id, "publish_context": answer.publish_context, "volume_context": self.context,
                       "volume_capability": mount(SINGLE_WRITER), "staging_target_path": self.staging}

    def stage(self):
        self.driver.call("NodeStageVolume", **self.fields)

    def publish(self):
        self.driver.call("NodePublishVolume", **self.fields, target_path=self.target)

    def unpublish(self):
        self.driver.call("NodeUnpublishVolume", volume_id=self.id, target_path=self.target)

    def unstage(self):
        self.driver.call("NodeUnstageVolume", volume_id=self.id, staging_target_path=self.staging)

    def delete(self):
        self.driver.call("ControllerUnpublishVolume", volume_id=self.id, node_id=self.node)
        self.driver.call("DeleteVolume", volume_id=self.id)

    def info(self):
        with open(self.file, encoding="utf-8") as file:
            return json.load(file)

    def exports(self):
        return {export["name"]: export for export in self.daemon.get("/v1/exports")}

    def check_is_published(self):
        export = self.exports()[self.export]
        assert export["state"] == "active" and export["labels"] == {"csi.driver": "freestone.csi"}, export
        assert self.info() == {
            "volume-type": "spdkvol", "device": export["options"]["socket"], "fstype": "ext4",
            "metadata": {"num_queues": "2", "queue_size": "256"}, "options": []}, self.info()
        # The first checks of Kata's runtime: a file that it may read, and a socket.
        assert stat.S_IMODE(os.stat(self.file).st_mode) == 0o600 and stat.S_IMODE(os.stat(self.place).st_mode) == 0o700
        assert stat.S_ISSOCK(os.stat(self.info()["device"]).st_mode)
        assert os.listdir(self.target) == [] and os.listdir(self.place) == ["mountInfo.json"]
        assert self.disks() == [], "the volume is attached to the machine"

    def check_nothing_is_left(self):
        assert self.export not in self.exports(), self.exports()
        assert not os.path.exists(self.target) and not os.path.exists(self.place)
        assert self.disks() == self.records() == [], (self.disks(), self.records())

    def disks(self):
        return os.listdir(self.driver.path("state/disks"))

    def records(self):
        return [name for name in os.listdir(self.driver.path("state")) if name.endswith(".json")]


def a_vmm_reads_and_writes_behind_the_socket_of_the_file(subject):
    """Also after a restart of the daemon, whose socket has the same path."""
    volume = Direct(subject)
    volume.publish_to_node()
    volume.stage()
    volume.publish()
    for _ in range(2):
        volume.check_is_published()
        device = f"virtio-blk-vhost-user:path={volume.info()['device']}"
        done = subprocess.run([paths.FREESTONE, "bench", "--device", device, "--rw", "randall", "--verify", "--qd", "4", "--time", "0.3"],
                              capture_output=True, text=True, timeout=BENCH_TIMEOUT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        volume.daemon.kill()
        volume.daemon.start()
    volume.unpublish()
    volume.unstage()
    volume.check_nothing_is_left()
    volume.delete()
    assert volume.daemon.get("/v1/exports") == volume.daemon.get("/v1/volumes") == []


def each_call_is_completed_after_a_kill_at_any_of_its_steps(subject):
    """A kill leaves the steps before it. So the later steps of a call are undone, or its first ones done, and it is repeated."""
    volume = Direct(subject)
    volume.publish_to_node()
    record = lambda: os.path.join(volume.driver.path("state"), volume.records()[0])

    def without_export():
        volume.daemon.delete(f"/v1/exports/{volume.export}")

    def while_the_file_system_is_made():
        without_export()
        with open(record(), encoding="utf-8") as file:
            known = json.load(file)
        with open(record(), "w", encoding="utf-8") as file:
            json.dump({**known, "direct": {"file_system_bytes": 0}}, file)
        # The disk of the backend `fake`.
        disk = hashlib.sha256(known["uuid"].encode()).hexdigest()[:32]
        with open(volume.driver.path(f"state/disks/{disk}"), "w", encoding="utf-8"):
            pass

    def without_file():
        os.remove(volume.file)

    def with_half_a_file():
        os.rename(volume.file, f"{volume.file}.new")
        with open(f"{volume.file}.new", "w", encoding="utf-8") as file:
            file.write('{"volume-')

    def without_directory():
        without_file()
        os.rmdir(volume.place)

    def without_target():
        without_directory()
        os.rmdir(volume.target)

    def nothing():
        pass

    for undo in (nothing, without_export, while_the_file_system_is_made):
        volume.stage()
        undo()
        volume.driver.restart()
        volume.stage()
        volume.publish()
        volume.check_is_published()
        volume.unpublish()
        undo()
        volume.driver.restart()
        for _ in range(2):
            volume.unstage()
            volume.check_nothing_is_left()
    volume.stage()
    for undo in (with_half_a_file, without_file, without_directory, without_target):
        volume.publish()
        undo()
        volume.driver.restart()
        volume.publish()
        volume.check_is_published()
        undo()
        volume.unpublish()
        assert not os.path.exists(volume.place) and not os.path.exists(volume.target), undo.__name__
    volume.publish()
    with open(os.path.join(volume.place, "sandbox-1"), "w", encoding="utf-8"):
        pass  # as Kata's runtime does
    refusal = volume.driver.refusal("NodeUnstageVolume", volume_id=volume.id, staging_target_path=volume.staging)
    assert refusal.code == "FAILED_PRECONDITION" and volume.target in refusal.message, refusal
    for _ in range(2):
        volume.unpublish()
    volume.unstage()
    volume.check_nothing_is_left()
    volume.delete()


def exports_of_before_a_restart_of_the_machine_are_replaced_or_removed(subject):
    """Records and files of Kata are gone then, and the daemon has its exports again."""
    volume = Direct(subject)
    volume.publish_to_node()

    def restart_machine():
        volume.stage()
        volume.publish()
        volume.driver.kill()
        for directory in (volume.driver.path("state"), volume.directory, volume.target):
            shutil.rmtree(directory)
        volume.driver.start()
        assert volume.export in volume.exports()

    restart_machine()
    # Not after a restart: only the records are lost.
    with socket.socket(socket.AF_UNIX) as guest:
        guest.connect(volume.exports()[volume.export]["options"]["socket"])
        volume.daemon.wait_for("the guest", lambda: volume.exports()[volume.export]["traffic"]["clients"] == 1)
        refusal = volume.driver.refusal("NodeStageVolume", **volume.fields)
        assert refusal.code == "FAILED_PRECONDITION" and "guest is connected" in refusal.message, refusal
    volume.daemon.wait_for("its end", lambda: volume.exports()[volume.export]["traffic"]["clients"] == 0)
    volume.driver.call("ControllerExpandVolume", volume_id=volume.id, capacity_range={"required_bytes": 128 * MIB})
    volume.stage()
    grown = volume.driver.call("NodeExpandVolume", volume_id=volume.id, volume_path=volume.staging,
                               capacity_range={"required_bytes": 128 * MIB})
    assert grown.capacity_bytes == 128 * MIB, grown
    volume.publish()
    volume.check_is_published()
    volume.unpublish()
    restart_machine()
    volume.unstage()
    volume.check_nothing_is_left()
    volume.delete()


def access_that_kata_does_not_support_is_refused_by_every_call(subject):
    volume = Direct(subject)
    volume.publish_to_node()
    cases = [(mount(WRITER), "SINGLE_NODE_WRITER"), (mount(SINGLE_WRITER, "xfs"), "xfs"), (block(SINGLE_WRITER), "block volume")]
    for capability, named in cases:
        fields = {**volume.fields, "volume_capability": capability}
        calls = [
            ("CreateVolume", {"name": "pvc-2", "volume_capabilities": [capability], "parameters": CLASS}),
            ("ControllerPublishVolume", {"volume_id": volume.id, "node_id": volume.node, "volume_context": volume.context,
                                         "volume_capability": capability}),
            ("NodeStageVolume", fields),
        ]
        for name, request in calls:
            refusal = volume.driver.refusal(name, **request)
            assert refusal.code == "INVALID_ARGUMENT" and named in refusal.message, (name, refusal)
        checked = volume.driver.call("ValidateVolumeCapabilities", volume_id=volume.id, volume_capabilities=[capability],
                                     volume_context=volume.context)
        assert named in checked.message and not checked.HasField("confirmed"), checked
    assert volume.exports().keys() == {f"csi-{volume.id.partition('/')[2]}"} and volume.records() == []
    volume.stage()
    refusal = volume.driver.refusal("NodePublishVolume", **{**volume.fields, "volume_capability": mount(WRITER)}, target_path=volume.target)
    assert refusal.code == "INVALID_ARGUMENT" and "SINGLE_NODE_WRITER" in refusal.message, refusal
    refusal = volume.driver.refusal("NodePublishVolume", **volume.fields, target_path="/" + "p" * 200)
    assert refusal.code == "INVALID_ARGUMENT" and "189 at most" in refusal.message, refusal
    refusal = volume.driver.refusal("CreateVolume", name="pvc-2", volume_capabilities=[mount()], parameters={"node-backend": "ublk"})
    assert refusal.code == "INVALID_ARGUMENT" and 'node-backend="ublk"' in refusal.message, refusal
    volume.unstage()
    volume.check_nothing_is_left()


def a_volume_grows_when_it_is_staged_and_its_room_is_not_known(subject):
    volume = Direct(subject)
    volume.publish_to_node()
    volume.stage()
    larger = {"required_bytes": 128 * MIB}
    grow = {"volume_id": volume.id, "volume_path": volume.staging, "capacity_range": larger}
    volume.publish()
    refusal = volume.driver.refusal("NodeGetVolumeStats", volume_id=volume.id, volume_path=volume.target)
    assert refusal.code == "UNIMPLEMENTED" and "Kata" in refusal.message, refusal
    volume.driver.call("ControllerExpandVolume", volume_id=volume.id, capacity_range=larger)
    for _ in range(2):
        refusal = volume.driver.refusal("NodeExpandVolume", **grow)
        assert refusal.code == "FAILED_PRECONDITION" and "restart its pod" in refusal.message, refusal
        # Without its export too: a guest has the file system mounted, and waits for the socket.
        volume.daemon.delete(f"/v1/exports/{volume.export}")
        volume.stage()
        volume.check_is_published()
    volume.unpublish()
    volume.unstage()
    volume.stage()
    assert volume.driver.call("NodeExpandVolume", **grow).capacity_bytes == 128 * MIB
    volume.unstage()


def a_volume_that_this_machine_does_not_serve_is_not_staged(subject):
    volume = Direct(subject)
    volume.publish_to_node()
    other = subject.daemon()
    node = subject.driver([Driver.backend(volume.daemon)], "--socket", other.socket, "--kata-dir", volume.directory)
    refusal = node.refusal("NodeStageVolume", **volume.fields)
    assert refusal.code == "FAILED_PRECONDITION" and "not on this machine" in refusal.message, refusal
    node.call("NodeUnstageVolume", volume_id=volume.id, staging_target_path=volume.staging)
    # An export of others is neither used nor removed.
    taken = {"name": volume.export, "kind": "vhost-user-blk", "volumes": [volume.id.partition("/")[2]]}
    volume.daemon.post("/v1/exports", taken)
    for name, fields in (("NodeStageVolume", volume.fields),
                         ("NodeUnstageVolume", {"volume_id": volume.id, "staging_target_path": volume.staging})):
        refusal = volume.driver.refusal(name, **fields)
        assert refusal.code == "FAILED_PRECONDITION" and "has not made it" in refusal.message, refusal
    volume.daemon.delete(f"/v1/exports/{volume.export}")
    volume.unstage()
    volume.check_nothing_is_left()

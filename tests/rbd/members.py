"""Images of a cluster and NVMe/TCP namespaces as members of arrays, and as the place of a pool (docs/raid.md)."""
import json
import pathlib
import signal
import subprocess
import time

from cluster import free_ports

SIZE_MIB = 128
VERIFY = ["--ioengine=nbd", "--rw=randwrite", "--size=8m", "--bs=4k", "--iodepth=16", "--verify=crc32c", "--verify_fatal=1"]
# After which a member that does not answer has failed.
MEMBER_TIMEOUT_S = 3
TIMEOUT_S = 90
NQN = "nqn.2014-08.org.example:member"


def an_array_of_images_is_served_once_and_keeps_its_data(lab):
    images = [lab.device(lab.image(f"leg{n}", f"{SIZE_MIB}M")) for n in (0, 1, 2)]
    lab.check("array", "create", "legs", "--level", "5", *images)
    devices = [f"{image},id=leg{n}" for n, image in enumerate(images)] + ["raid:members=leg0+leg1+leg2"]
    with lab.bridge(*devices) as server:
        lab.fio(*VERIFY, f"--uri={server.uri}")
        # A member that another host uses does not count as missing: the array would run on both, degraded.
        command = [argument for device in devices for argument in ("--device", device)]
        second = lab.freestone("info", *command)
        assert second.returncode != 0 and "has it; force=on breaks its lock" in second.stderr, second.stderr
    with lab.bridge(*devices) as server:
        lab.fio(*VERIFY, f"--uri={server.uri}", "--verify_only=1")
    lab.check("array", "check", *images)


def slow_an_array_fails_an_image_whose_osd_does_not_answer(lab):
    """A mirror of an image and a file. Requests to the image time out, because the configuration says so."""
    conf = lab.cluster.directory / "impatient.conf"
    text = lab.cluster.conf.read_text().replace("[global]", f"[global]\nrados_osd_op_timeout = {MEMBER_TIMEOUT_S}")
    conf.write_text(text)
    image = lab.device(lab.image("remote", f"{SIZE_MIB}M"), f",conf={conf}")
    local = _file(lab, "local.img")
    lab.check("array", "create", "both", "--level", "1", image, local)
    with lab.bridge(f"{image},id=remote", f"raid:members=remote+{local},name=both") as server:
        osd = lab.cluster.processes["osd"]
        try:
            osd.send_signal(signal.SIGSTOP)
            lab.fio(*VERIFY, f"--uri={server.uri}")
        finally:
            osd.send_signal(signal.SIGCONT)
        assert _states(lab, "both")[0] != "live", _show(lab, "both")
        _returns(lab, "both", image)
        lab.fio(*VERIFY, f"--uri={server.uri}", "--randseed=3")
        # The image has it all.
        lab.check("array", "fail", "both", local)
        lab.fio(*VERIFY, f"--uri={server.uri}", "--randseed=3", "--verify_only=1")


def slow_an_array_lives_without_a_target_of_nvme_tcp_until_it_returns(lab):
    port, = free_ports(1)
    backing, local = _file(lab, "target.img"), _file(lab, "near.img")
    member = f"nvme-tcp:address=127.0.0.1:{port},nqn={NQN},ctrl-loss-tmo={MEMBER_TIMEOUT_S},reconnect-delay=1"
    target = lambda: lab.server(f"io_uring:path={backing}", export=f"nvme-tcp:listen=127.0.0.1:{port},nqn={NQN}")
    first = target()
    try:
        lab.check("array", "create", "far", "--level", "1", member, local)
        with lab.bridge(f"{member},id=far", f"raid:members=far+{local},name=far") as server:
            load = lab.fio_start(*VERIFY, f"--uri={server.uri}", "--rate_iops=200")
            time.sleep(1)
            first.kill()
            assert load.wait(120) == 0, "a request failed"
            assert _states(lab, "far")[0] != "live", _show(lab, "far")
            first.end()
            first = target()
            _returns(lab, "far", member)
            lab.check("array", "fail", "far", local)
            lab.fio(*VERIFY, f"--uri={server.uri}", "--verify_only=1")
    finally:
        first.end()


def a_daemon_has_volumes_on_an_image_and_an_array_of_images(lab):
    images = [lab.image(f"pool{n}", f"{SIZE_MIB}M") for n in (0, 1, 2)]
    lock = lambda image: f",lock-file={lab.cluster.directory}/{image}.lock"
    device, *members = [lab.device(image, lock(image)) for image in images]
    with Daemon(lab) as daemon:
        daemon.run("device", "create", "ceph", device)
        daemon.run("volume", "create", "v1", "--device", "ceph", "--size", "64M")
        daemon.run("array", "create", "pair", "--level", "1", *members)
        daemon.run("volume", "create", "v2", "--array", "pair", "--size", "64M")
        for volume in "v1", "v2":
            daemon.run("export", "create", volume, "--kind", "nbd", "--volume", volume, "--option", f"socket={daemon.directory}/{volume}")
            lab.fio(*VERIFY, f"--uri={daemon.uri(volume)}")
        # The successor has the locks of its dead predecessor at once.
        daemon.process.kill()
        daemon.process.wait()
        daemon.start()
        for volume in "v1", "v2":
            lab.fio(*VERIFY, f"--uri={daemon.uri(volume)}", "--verify_only=1")


class Daemon:
    """`freestoned`; ends with `with`."""

    def __init__(self, lab):
        self.lab, self.directory = lab, lab.cluster.directory / "daemon"
        self.directory.mkdir()
        self.socket = self.directory / "d.sock"

    def start(self):
        self.socket.unlink(missing_ok=True)
        command = [self.lab.freestoned, "--state-dir", self.directory / "state", "--socket", self.socket,
                   "--sandbox-path", self.lab.cluster.directory, *self.lab.sandbox_paths()]
        with open(self.directory / "log", "a") as log:
            self.process = subprocess.Popen(command, env=self.lab.env, stdout=log, stderr=log)
        deadline = time.monotonic() + TIMEOUT_S
        while not self.socket.exists() or self.lab.freestone("status", "--wait", "--socket", str(self.socket)).returncode != 0:
            assert self.process.poll() is None and time.monotonic() < deadline, self.text()
            time.sleep(0.1)

    def text(self):
        return (self.directory / "log").read_text()

    def run(self, *args):
        return self.lab.check(*args, "--socket", str(self.socket))

    def uri(self, export):
        return f"nbd+unix:///?socket={self.directory}/{export}"

    def __enter__(self):
        try:
            self.start()
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            assert self.process.wait(60) == 0, self.text()
        finally:
            self.process.kill()
            self.process.wait()


def _file(lab, name):
    path = pathlib.Path(lab.cluster.directory) / name
    with open(path, "wb") as file:
        file.truncate(SIZE_MIB << 20)
    return str(path)


def _show(lab, array):
    return json.loads(lab.check("array", "show", array, "--json"))


def _states(lab, array):
    return [member["state"] for member in _show(lab, array)["members"]]


def _returns(lab, array, member):
    """Gives a failed member back, and waits until it has everything."""
    lab.check("array", "re-add", array, member)
    deadline = time.monotonic() + TIMEOUT_S
    while set(_states(lab, array)) != {"live"}:
        assert time.monotonic() < deadline, _show(lab, array)
        time.sleep(0.2)


CASES = [
    an_array_of_images_is_served_once_and_keeps_its_data,
    slow_an_array_fails_an_image_whose_osd_does_not_answer,
    slow_an_array_lives_without_a_target_of_nvme_tcp_until_it_returns,
    a_daemon_has_volumes_on_an_image_and_an_array_of_images,
]

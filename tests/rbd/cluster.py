"""A Ceph cluster of one monitor and one OSD, on loopback, from unpacked packages (tests/rbd/setup)."""
import os
import pathlib
import socket
import subprocess
import time
import uuid

TIMEOUT_S = 60

CONF = """[global]
fsid = {fsid}
mon_host = [v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]
mon_initial_members = a
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
public_network = 127.0.0.0/8
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
osd_objectstore = bluestore
bluestore_block_size = 4294967296
bluestore_fsck_on_mount = false
mon_allow_pool_size_one = true
mon_data_avail_crit = 1
mon_data_avail_warn = 1
run_dir = {directory}/run
osd_class_dir = {libraries}/rados-classes
plugin_dir = {libraries}/ceph
erasure_code_dir = {libraries}/ceph/erasure-code
[mon]
log_file = {directory}/$name.log
mon_data = {directory}/mon
[osd]
log_file = {directory}/$name.log
osd_data = {directory}/osd
"""


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Cluster:
    """Starts with `with`; ends its own processes."""

    def __init__(self, root, directory):
        root = pathlib.Path(root)
        libraries = root / "usr/lib/x86_64-linux-gnu"
        self.directory = pathlib.Path(directory)
        self.bin = root / "usr/bin"
        self.conf = self.directory / "ceph.conf"
        self.env = dict(
            os.environ,
            LD_LIBRARY_PATH=f"{libraries}:{libraries}/ceph:{root}/lib/x86_64-linux-gnu",
            PYTHONPATH=str(root / "usr/lib/python3/dist-packages"),
            CEPH_CONF=str(self.conf),
        )
        for name in ("mon", "osd", "run"):
            (self.directory / name).mkdir()
        self.fsid = str(uuid.uuid4())
        self.v2, self.v1 = free_ports(2)
        self.conf.write_text(
            CONF.format(fsid=self.fsid, v2=self.v2, v1=self.v1, directory=self.directory, libraries=libraries)
        )
        self.processes = {}

    def call(self, program, *args, timeout=TIMEOUT_S):
        """Runs a program of Ceph and returns its output."""
        command = [self.bin / program, *args]
        if program == "ceph":
            command.insert(0, "/usr/bin/python3")
        done = subprocess.run(command, env=self.env, timeout=timeout, text=True, capture_output=True)
        if done.returncode != 0:
            raise RuntimeError(f"{program} {' '.join(args)}: exit {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def start(self, name):
        """Starts `mon` or `osd`."""
        log = open(self.directory / f"{name}.out", "a")
        identifier = {"mon": "a", "osd": "0"}[name]
        command = [self.bin / f"ceph-{name}", "-f", "-i", identifier]
        self.processes[name] = subprocess.Popen(command, env=self.env, stdout=log, stderr=log)

    def stop(self, name):
        process = self.processes.pop(name)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def restart_osd(self, away_s):
        """Stops the OSD, and starts it again when it was away for a time."""
        self.stop("osd")
        self.wait_for_osd("0 up")
        time.sleep(away_s)
        self.start("osd")
        self.wait_for_osd("1 up")

    def wait_for_osd(self, state="1 up"):
        deadline = time.monotonic() + TIMEOUT_S
        while state not in self.call("ceph", "osd", "stat"):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the OSD is not {state}: see {self.directory}")
            time.sleep(0.2)

    def __enter__(self):
        try:
            address = f"[v2:127.0.0.1:{self.v2},v1:127.0.0.1:{self.v1}]"
            monmap = str(self.directory / "monmap")
            self.call("monmaptool", "--create", "--fsid", self.fsid, "--addv", "a", address, monmap)
            self.call("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)
            self.start("mon")
            self.call("ceph", "osd", "create")
            self.call("ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=localhost")
            self.call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", str(uuid.uuid4()))
            self.start("osd")
            self.wait_for_osd()
            self.call("ceph", "osd", "pool", "create", "rbd", "8", "8")
            self.call("rbd", "pool", "init", "rbd")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in ("osd", "mon"):
            if name in self.processes:
                self.stop(name)

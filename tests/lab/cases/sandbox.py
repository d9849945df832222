"""The sandbox over devices that only a guest has, and on kernels that cannot do all of it."""

import paths
from devices import Namespace, Nvme, Vdpa, VfioPci
from lab import needs_freestone

NO_CAPABILITIES = 0
CAP_SYS_ADMIN = 1 << 21


@needs_freestone
def drives_are_served_from_within_the_sandbox(lab):
    guest = lab.boot_with(Nvme([Namespace(), Namespace()]), cpus=2)
    job = _serve(guest, "--device nvme_uring:path=/dev/ng0n1", "/run/disk.sock")
    _assert_confined(guest, CAP_SYS_ADMIN)
    _work_and_stop(guest, job)
    job = _serve(guest, "--device io_uring:path=/dev/nvme0n2,direct=on,fixed-buffers", "/run/disk.sock")
    _assert_confined(guest, NO_CAPABILITIES)
    _work_and_stop(guest, job)


@needs_freestone
def a_pci_function_is_served_from_within_the_sandbox(lab):
    device = VfioPci()
    guest = lab.boot_with(device, cpus=2)
    job = _serve(guest, f"--device virtio-blk-vfio-pci:path={device.paths[0]}", "/run/disk.sock")
    _assert_confined(guest, NO_CAPABILITIES)
    _work_and_stop(guest, job)


@needs_freestone
def a_vdpa_device_is_served_from_within_the_sandbox(lab):
    device = Vdpa()
    guest = lab.boot_with(device, cpus=2)
    job = _serve(guest, f"--device virtio-blk-vhost-vdpa:path={device.paths[0]}", "/run/disk.sock")
    _assert_confined(guest, NO_CAPABILITIES)
    _work_and_stop(guest, job)


@needs_freestone
def a_kernel_without_landlock_is_told_of_and_refused_where_it_is_required(lab):
    guest = lab.boot_alone(kernel_arguments="lsm=yama")
    job = _serve(guest, "--device mem:size=16M", "/run/disk.sock")
    said = guest.sh("cat /run/server.out")
    assert "WARN sandbox: no landlock (the kernel does not have Landlock" in said, said
    _assert_confined(guest, NO_CAPABILITIES)
    guest.sh("kill $(cat /run/server.pid)")
    job.wait(60)
    code, said = guest.sh(f"timeout 60 {_command('--device mem:size=16M', '/run/disk.sock')} --sandbox required", check=False)
    assert code == 1 and "freestone: sandbox: the kernel does not have Landlock" in said, (code, said)


def _command(devices, socket):
    return f"{paths.FREESTONE} serve {devices} --export vhost-user-blk:socket={socket}"


def _serve(guest, devices, socket):
    job = guest.start("server", f"echo $BASHPID >/run/server.pid; exec {_command(devices, socket)}")
    guest.sh("for i in $(seq 600); do if grep -q ^ready /run/server.out; then exit 0; fi; sleep 0.1; done; cat /run/server.out; exit 1",
             timeout_s=120)
    return job


def _assert_confined(guest, capabilities):
    status = guest.sh("cat /proc/$(cat /run/server.pid)/task/*/status")
    threads = status.count("\nPid:")
    assert threads > 2, status
    for line in ("NoNewPrivs:\t1", "Seccomp:\t2", f"CapEff:\t{capabilities:016x}", f"CapPrm:\t{capabilities:016x}"):
        assert status.count(line) == threads, (line, status)


def _work_and_stop(guest, job):
    output = guest.sh(f"{paths.FREESTONE} bench --device virtio-blk-vhost-user:path=/run/disk.sock --rw randall --verify --qd 8 --time 2",
                      timeout_s=300)
    assert "verified" in output, output
    pid = "$(cat /run/server.pid)"
    guest.sh(f"kill -HUP {pid}; for i in $(seq 100); do if grep -q ^refreshed /run/server.out; then exit 0; fi; sleep 0.1; done; exit 1")
    guest.sh(f"kill {pid}")
    job.wait(60)
    said = guest.sh("cat /run/server.out")
    assert "ERROR" not in said and "sandbox refused" not in said, said

"""NVMe/TCP: the driver nvme-tcp in a guest, on the target of the guest's own kernel."""

import json
import time

import paths
from lab import needs_freestone
from nvmet import PROOFS, KernelTarget, TlsDaemon
from runner import nightly
from ublk_server import UblkServer
from workload import FIO_JSON, fio_result, fio_verify

BENCH_TIMEOUT_S = 300
LOSSES = 3


@needs_freestone
@nightly
def every_request_comes_back_as_it_was_with_digests_and_without(lab):
    guest = lab.boot_alone(cpus=2)
    targets = [KernelTarget(guest, port=4420), KernelTarget(guest, block_device=True, port=4421)]
    # Each target and each block size meets each digest.
    for number, digests in enumerate(("", ",hdgst=on", ",ddgst=on", ",hdgst=on,ddgst=on")):
        for target, size in (targets[number % 2], "4k"), (targets[1 - number % 2], "256k"):
            _bench(guest, f"{target.device}{digests}", f"--bs {size} --time 1")
    _bench(guest, f"{targets[0].device},nsid=1,queues=2,queue-depth=3,kato=1", "--queues 2 --time 2")


@needs_freestone
def the_suite_passes_on_a_kernel_target(lab):
    guest = lab.boot_alone(cpus=2)
    for port, block_device, words in (4420, False, ""), (4421, True, "digests"):
        target = KernelTarget(guest, block_device=block_device, port=port)
        guest.sh(f"{paths.DRIVER_CHECK} nvme tcp {target.address} {target.nqn} {words}", timeout_s=600)


@needs_freestone
def targets_that_cannot_be_opened_are_refused_in_words(lab):
    guest = lab.boot_alone()
    target = KernelTarget(guest)
    for device, words in [
        (f"nvme-tcp:address={target.address},nqn=nqn.2014-08.org.example:none", "does not accept the subsystem's name"),
        (f"{target.device},nsid=9", "no namespace 9"),
        (f"nvme-tcp:address=127.0.0.1:9,nqn={target.nqn}", "Connection refused"),
        (f"nvme-tcp:address={target.address},nqn=disk", "starts with"),
    ]:
        code, output = guest.sh(f"{paths.FREESTONE} bench --device {device} --time 1", check=False)
        assert code != 0 and words in output, f"{device}: code {code}, {output}"


@needs_freestone
def a_kernel_target_says_what_it_has(lab):
    guest = lab.boot_alone()
    targets = [KernelTarget(guest, port=port) for port in (4420, 4421)]
    for target in targets:
        for digests in "", ",hdgst=on,ddgst=on":
            said = guest.sh(f"{paths.FREESTONE} discover --json nvme-tcp:address={target.address}{digests}")
            entries = [json.loads(line) for line in said.splitlines()]
            there = [(entry["nqn"], entry["service"]) for entry in entries if entry["kind"] == "nvm"]
            assert there == [(target.nqn, target.address.split(":")[1])], said
            assert [entry["kind"] for entry in entries].count("discovery") == 1, said


@needs_freestone
@nightly
def a_kernel_target_learns_who_the_host_is_with_every_hash(lab):
    guest = lab.boot_alone(cpus=2)
    target = KernelTarget(guest)
    host = "nqn.2014-08.org.example:host"
    secret, ours = guest.sh(f"nvme gen-dhchap-key -m 2 -n {host}; nvme gen-dhchap-key -m 0").split()
    guest.sh(f"umask 077; echo '{secret}' >/run/key; echo '{ours}' >/run/ours; nvme gen-dhchap-key -m 1 -n {host} >/run/other")
    plain = f"{target.device},hostnqn={host}"
    for hash_name, group in PROOFS:
        target.ask_for_proof(host, secret, ours, hash_name, group)
        for both in "", ",dhchap-ctrl-key=/run/ours,hdgst=on,ddgst=on":
            said = _bench(guest, f"{plain},dhchap-key=/run/key{both}", "--bs 4k --time 1 --log warn,drivers=debug 2>&1")
            found = [line for line in said.splitlines() if "authenticated" in line]
            assert len(found) >= 2 and all(hash_name in line and group in line for line in found), said
    for device, words in [
        (plain, "no secret is configured (dhchap-key)"),
        (f"{plain},dhchap-key=/run/other", "the target refuses the host: authentication failed"),
        (f"{plain},dhchap-key=/run/key,dhchap-ctrl-key=/run/other", "the target does not know its secret"),
    ]:
        code, output = guest.sh(f"{paths.FREESTONE} bench --device {device} --time 1", check=False)
        assert code != 0 and words in output, f"{device}: code {code}, {output}"
    # The kernel says who was refused.
    guest.sh("dmesg -C")


@needs_freestone
@nightly
def a_kernel_target_is_reached_through_tls(lab):
    guest = lab.boot_alone(cpus=2)
    tls, host = TlsDaemon(guest), "nqn.2014-08.org.example:host"
    key = tls.make_key()
    guest.sh(f"umask 077; echo {key} >/run/key; {tls.nvme} gen-tls-key --hmac=1 >/run/other")
    for identity in 0, 1:
        # The target has no key with the other identity.
        target = KernelTarget(guest, port=4420 + identity, tls=True)
        tls.insert(key, host, target.nqn, identity)
        device = f"{target.device},hostnqn={host},tls-key=/run/key"
        _bench(guest, device, "--bs 4k --time 2")
        _bench(guest, f"{device},ddgst=on", "--bs 256k --time 2 --queues 2")
        for other in "", ",tls-key=/run/other":
            code, output = guest.sh(f"{paths.FREESTONE} bench --device {target.device},hostnqn={host}{other} --time 1", check=False)
            assert code != 0 and ("does not accept the TLS key" in output or not other), output
    # The kernel says who was refused.
    guest.sh("dmesg -C")


@needs_freestone
def a_target_that_goes_and_comes_back_is_only_a_pause(lab):
    guest = lab.boot_alone(cpus=2)
    guest.modprobe("ublk_drv", "ext4")
    target = KernelTarget(guest, size_mib=96)
    server = UblkServer(guest, f"--device {target.device},hdgst=on,reconnect-delay=1 --export ublk:id=0,queues=2 --cores 0,1")
    server.start()
    guest.sh("mkfs.ext4 -q -F /dev/ublkb0 && mkdir -p /mnt/disk && mount /dev/ublkb0 /mnt/disk")
    load = guest.start("load", fio_verify("/mnt/disk/file", "24m", "--numjobs=2 --offset_increment=24m --rate_iops=400"
                                          f" --group_reporting {FIO_JSON}"))
    losses = 0
    while losses < LOSSES and load.is_running():
        time.sleep(2)
        target.close()
        time.sleep(1)
        target.open()
        losses += 1
    assert losses == LOSSES, f"the load ended after {losses} losses"
    job = fio_result(load.wait(timeout_s=800))
    assert job["error"] == 0 and job["read"]["total_ios"] > 0, job
    guest.sh("umount /mnt/disk && e2fsck -f -n /dev/ublkb0")
    said = guest.sh("cat /run/server.out")
    server.stop()
    assert said.count("reconnected") >= LOSSES, said
    # The target itself has what the disk had.
    guest.sh(f"e2fsck -f -n {target.file}")


@needs_freestone
def a_namespace_that_grows_is_noticed(lab):
    guest = lab.boot_alone()
    target = KernelTarget(guest, size_mib=32)
    guest.modprobe("ublk_drv")
    server = UblkServer(guest, f"--device {target.device} --export ublk:id=0")
    server.start()
    target.resize(48)
    guest.sh(f"for i in $(seq 200); do grep -q 'namespace capacity changed.*{48 << 20}' /run/server.out && exit 0; sleep 0.05; done;"
             " cat /run/server.out; exit 1")
    server.stop()


def _bench(guest, device, options):
    output = guest.sh(f"{paths.FREESTONE} bench --device {device} --rw randall --verify --qd 16 {options}",
                      timeout_s=BENCH_TIMEOUT_S)
    assert "verified" in output, output
    return output

"""NFS with the SCSI layout over an export with reservations: the client of one guest reads and writes the disk itself, the
server of the other hands out where files lie (RFC 8154, RFC 9561)."""

import hashlib
import re

import paths
from lab import needs_freestone
from runner import nightly
from shared_volume import RESERVATION_CONFLICT, share
from workload import KILLS, MIB, fio_verify_again, fio_verify_until_enough, kernel_errors, kill_under_load

DISK_MIB = 384
GROWN_MIB = 448
FILE_MIB = 8
NEW_MIB = 32
# Of NFS servers of Linux (fs/nfsd/blocklayout.c).
SERVER_KEY = 0x0100000000000000
EXCLUSIVE_FOR_REGISTRANTS = 4
STEP_TIMEOUT_S = 600
RECALL_S = 15  # for which a server waits until a client has returned its layouts; 45 by default
TRACES = "/sys/kernel/tracing"
# Each job waits for one request at a time, so that a task that waits is a request that waits.
LOAD = ("/mnt/load", "2m", "--ioengine=psync --numjobs=2 --offset_increment=2m")


@needs_freestone
@nightly
def an_nfs_client_reads_and_writes_the_shared_disk_itself(lab):
    server, (exporter, client) = share(lab, DISK_MIB)
    _export(exporter)
    _mount(client)
    _data_goes_directly_and_is_the_same_for_both(exporter, client)
    keys = _reservation(exporter)
    load = client.guest.start("load", "trap '' PIPE; " + fio_verify_until_enough(*LOAD))
    waiting = kill_under_load(server, load, KILLS, every_s=2, down_s=2, disk="nvme0n1", count=_requests_that_wait)
    assert all(waiting), f"requests that waited for the next server: {waiting}"
    assert _reservation(exporter) == keys, "the reservation has changed"
    client.drop_caches()
    client.guest.sh(fio_verify_again(*LOAD), STEP_TIMEOUT_S)
    _the_volume_grows(server, exporter, client)
    _went_directly(client)
    client.guest.sh("umount /mnt", STEP_TIMEOUT_S)
    exporter.guest.sh(f"exportfs -ua; rpc.nfsd 0; umount /export && xfs_repair -n {exporter.disk}", STEP_TIMEOUT_S)
    for host in exporter, client:
        host.guest.sh("nvme disconnect-all")
        assert not kernel_errors(host.guest), kernel_errors(host.guest)
    return f"{len(waiting)} kills, each with requests that waited"


@needs_freestone
@nightly
def an_nfs_client_that_is_frozen_and_cut_off_is_fenced_before_its_file_changes(lab):
    # Linux 6.12 repeats the recall until the client's lease has expired, and then lets the writer through.
    server, (exporter, client) = share(lab, DISK_MIB, kernels=(paths.NEW_KERNEL, paths.KERNEL))
    _export(exporter)
    exporter.guest.sh(f"echo {RECALL_S} >/proc/sys/fs/lease-break-time; mountpoint -q {TRACES} || mount -t tracefs tracefs {TRACES}"
                      f"; echo 1 >{TRACES}/events/nfsd/nfsd_cb_queue/enable; fallocate -l 64M /export/file")
    # A file that is open at the server is not delegated to a client, so that only its layouts are recalled.
    exporter.guest.start("holder", "exec 9<>/export/file; echo $BASHPID >/run/holder; exec sleep infinity")
    _mount(client)
    client.guest.start("load", "fio --name=load --filename=/mnt/file --size=64m --rw=randwrite --bs=4k --iodepth=16 --direct=1"
                               " --ioengine=libaio --time_based --runtime=9999")
    client.until(f"[ $(awk '{{ print $7 }}' /sys/block/nvme0n1/stat) -gt {client.sectors()[1] + 1000} ]")
    _went_directly(client)
    [key] = _reservation(exporter).keys() - {SERVER_KEY}
    # It does not hear of the recall when it continues, and uses the layout that it has.
    client.guest.qmp("set_link", name="peer", up=False)
    client.guest.qmp("stop")
    exporter.guest.sh("truncate -s 4M /export/file", STEP_TIMEOUT_S)
    assert "CB_LAYOUTRECALL" in exporter.guest.sh(f"cat {TRACES}/trace"), "no layout was recalled: this run shows nothing"
    last = server.changes()[-1]
    assert "action: PreemptAndAbort" in last and f"current: {SERVER_KEY}, preempted: {key}" in last, last
    assert exporter.reservation() == (EXCLUSIVE_FOR_REGISTRANTS, 1, {SERVER_KEY: True}), exporter.reservation()
    exporter.guest.sh("xfs_freeze -f /export", STEP_TIMEOUT_S)
    content = _sha256(server.image)  # which holds still now
    client.guest.qmp("cont")
    client.until("dmesg | grep -q 'reservation conflict error.*(WRITE)'", STEP_TIMEOUT_S)
    code, said = client.guest.sh(f"dd if=/dev/zero of={client.disk} bs=64k count=1 oflag=direct", STEP_TIMEOUT_S, check=False)
    assert code != 0 and RESERVATION_CONFLICT in said, said
    assert _sha256(server.image) == content, "the client has written to the disk after it was fenced"
    client.guest.close()
    exporter.guest.sh("xfs_freeze -u /export; kill $(cat /run/holder); exportfs -ua; rpc.nfsd 0; umount /export && xfs_repair -n /dev/nvme0n1", STEP_TIMEOUT_S)
    lab.guest = exporter.guest  # whose kernel has no complaint


def _sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _export(exporter):
    """Make a file system and start the NFS server."""
    exporter.guest.modprobe("xfs", "nfsd")
    exporter.guest.sh(f"""
        mkfs.xfs -q {exporter.disk} && mkdir -p /export && mount {exporter.disk} /export
        mkdir -p /var/lib/nfs/rpc_pipefs /var/lib/nfs/nfsdcld; touch /var/lib/nfs/etab /var/lib/nfs/rmtab
        mount -t rpc_pipefs rpc_pipefs /var/lib/nfs/rpc_pipefs; mount -t nfsd nfsd /proc/fs/nfsd
        nfsdcld; rpc.mountd -N 3
        exportfs -i -o rw,no_root_squash,insecure,no_subtree_check,fsid=0,pnfs 10.8.0.0/24:/export
        rpc.nfsd -N 3 -G 10 2""", STEP_TIMEOUT_S)


def _mount(client):
    """Name the disk as udev does, and mount what the server exports."""
    client.guest.modprobe("nfsv4", "blocklayoutdriver")
    client.guest.sh(f"""
        mkdir -p /dev/disk/by-id
        ln -s {client.disk} /dev/disk/by-id/nvme-eui.$(tr -d - </sys/block/nvme0n1/nguid)
        mount -t nfs4 -o vers=4.2 10.8.0.1:/ /mnt""", STEP_TIMEOUT_S)


def _data_goes_directly_and_is_the_same_for_both(exporter, client):
    sectors = FILE_MIB * MIB // 512
    before = client.sectors()
    _write(client, "/mnt/of-client", FILE_MIB)
    _write(exporter, "/export/of-server", FILE_MIB)
    _both_read_the_same(exporter, client, "of-client", "of-server")
    _went_directly(client)
    read, written = (after - since for after, since in zip(client.sectors(), before))
    assert written >= sectors and read >= 2 * sectors, f"{read} sectors read, {written} written; two files have {sectors} each"


def _went_directly(client):
    """The client has layouts, and no data has gone through the server since the mount."""
    stats = client.guest.sh("cat /proc/self/mountstats")
    assert "pnfs=LAYOUT_SCSI" in stats, stats
    calls = {name: int(count) for name, count in re.findall(r"^\s+([A-Z_]+): (\d+)", stats, re.MULTILINE)}
    assert calls["LAYOUTGET"] > 0 and calls["GETDEVICEINFO"] > 0, calls
    assert (calls["READ"], calls["WRITE"]) == (0, 0), calls


def _reservation(exporter):
    """The keys of both hosts; the server's holds the reservation, which persists."""
    kind, persists, keys = exporter.reservation()
    assert (kind, persists, len(keys)) == (EXCLUSIVE_FOR_REGISTRANTS, 1, 2), (kind, persists, keys)
    assert keys[SERVER_KEY] and sum(keys.values()) == 1, keys
    return keys


def _requests_that_wait(guest, disk):
    return int(guest.sh("grep -l '^[0-9]* (fio) D' /proc/[0-9]*/stat 2>/dev/null | wc -l"))


def _the_volume_grows(server, exporter, client):
    """The file system is full, grows, and the client writes to what is new."""
    exporter.guest.sh(f"fallocate -l $(($(stat -f -c '%a * %S' /export) - {NEW_MIB // 2 * MIB})) /export/filler")
    server.grow(GROWN_MIB)
    for host in exporter, client:
        host.until(f"[ $(cat /sys/block/nvme0n1/size) = {GROWN_MIB * MIB // 512} ]")
    exporter.guest.sh("xfs_growfs /export")
    _write(client, "/mnt/new", NEW_MIB)
    _both_read_the_same(exporter, client, "new")
    extents = exporter.guest.sh("filefrag -e -b1048576 /export/new")
    ends = [int(end) for end in re.findall(r"^ *\d+: +\d+\.\. +\d+: +\d+\.\. +(\d+):", extents, re.MULTILINE)]
    assert max(ends) >= DISK_MIB, f"the file does not use what is new:\n{extents}"


def _write(host, path, size_mib):
    host.guest.sh(f"dd if=/dev/urandom of={path} bs=1M count={size_mib} conv=fsync status=none", STEP_TIMEOUT_S)


def _both_read_the_same(exporter, client, *names):
    for host in exporter, client:
        host.drop_caches()
    for name in names:
        sums = [host.guest.sh(f"md5sum <{path}/{name}", STEP_TIMEOUT_S) for host, path in ((exporter, "/export"), (client, "/mnt"))]
        assert sums[0] == sums[1], f"{name}: {sums}"

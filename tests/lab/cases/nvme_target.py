"""Our NVMe/TCP target, as the stock initiator of the guest's kernel and nvme-cli find it; both are in the guest."""

import json
import os
import struct
import time

from lab import needs_freestone
from nvmet import PROOFS, TlsDaemon
from runner import nightly
from ublk_server import UblkServer
from workload import KILLS, MIB, end_of_load, fio_verify, fio_verify_until_enough, kill_under_load, requests_completed

DISK = "/dev/shm/disk"
DISK_MIB = 96
NQN = "nqn.2014-08.org.example:lab"
HOST = "nqn.2014-08.org.nvmexpress:uuid:4c1d5d0e-6b8f-4d68-8a0a-0d0e6a1b2c3d"
HOST_ID = "4c1d5d0e-6b8f-4d68-8a0a-0d0e6a1b2c3d"
AT = "-t tcp -a 127.0.0.1 -s 4420"
FILE = f"--device io_uring:path={DISK},id=disk"
EXPORT = f"--export nvme-tcp:listen=127.0.0.1:4420,nqn={NQN},hosts={HOST}"
# Slow enough that every kill finds commands on their way.
SLOW_FILE = f"{FILE} --layer fault:op=read+write,delay-us=10000"
LOAD_IOPS = 800
LOAD_MIB = 36
TLS_KILLS = min(KILLS, 5)  # what a recovery has to do is the same as without TLS
SECOND_ADDRESS = "10.9.9.1"
SUBSYSTEMS = 100


@needs_freestone
def the_stock_initiator_finds_a_disk_like_any_other(lab):
    guest = _boot(lab)
    server = UblkServer(guest, f"{FILE} --device mem:size=16M,id=ram,readonly {EXPORT},device=disk+ram,serial=LAB1 --cores 0,1")
    server.start()
    said = json.loads(guest.sh(f"nvme discover {AT} --hostnqn {HOST} --hostid {HOST_ID} -o json"))
    assert [record["subnqn"] for record in said["records"] if record["subtype"] == "nvme subsystem"] == [NQN], said
    code, output = guest.sh(_connect(host="nqn.2014-08.org.example:stranger"), check=False)
    assert code != 0, output
    guest.sh("dmesg -C")
    for options in "", "-g", "-G", "-g -G":
        disk = _connect_to(guest, options)
        _what_the_kernel_was_told(guest, disk)
        guest.sh(fio_verify(f"/dev/{disk}", "4m", "--bsrange=512-512k --bs_unaligned=0 --ba=512"))
        guest.sh(f"nvme disconnect -n {NQN}")
    disk = _connect_to(guest, "-g -G -i 2")
    _a_file_system_keeps_its_files(guest, disk)
    _every_kind_of_command_arrives(guest, server, disk)
    _a_namespace_that_grows_is_noticed(guest, server, disk)
    guest.sh(f"nvme disconnect -n {NQN}")
    server.stop()


def _what_the_kernel_was_told(guest, disk):
    controller = json.loads(guest.sh("nvme id-ctrl /dev/nvme0 -o json"))
    assert (controller["sn"].strip(), controller["mn"].strip(), controller["subnqn"]) == ("LAB1", "Freestone", NQN), controller
    assert (controller["nn"], controller["mdts"], controller["ioccsz"]) == (2, 8, 1028), controller
    namespace = json.loads(guest.sh("nvme id-ns /dev/nvme0 -n 1 -o json"))
    assert namespace["nsze"] * 512 == DISK_MIB * MIB, namespace
    listed = json.loads(guest.sh("nvme list -o json"))["Devices"]
    assert len(listed) == 2, listed
    modes = guest.sh(f"cat /sys/block/{disk}/ro /sys/block/{_disk(guest, 2)}/ro").split()
    assert modes == ["0", "1"], modes
    queue = f"/sys/block/{disk}/queue"
    assert guest.sh(f"cat {queue}/write_cache {queue}/fua").split() == ["write", "back", "1"]
    for name in "discard_max_bytes", "write_zeroes_max_bytes":
        assert int(guest.sh(f"cat {queue}/{name}")) > 0, name


def _a_file_system_keeps_its_files(guest, disk):
    guest.modprobe("ext4")
    guest.sh(f"mkfs.ext4 -q -F /dev/{disk} && mkdir -p /mnt/disk && mount /dev/{disk} /mnt/disk")
    guest.sh(fio_verify("/mnt/disk/file", "6m", "--numjobs=2 --offset_increment=6m --bsrange=4k-256k"))
    guest.sh(f"rm /mnt/disk/file && fstrim /mnt/disk && umount /mnt/disk && e2fsck -f -n /dev/{disk}")


def _every_kind_of_command_arrives(guest, server, disk):
    export = "nvme-tcp:127.0.0.1:4420"
    before = server.count(export)
    guest.sh(f"dd if=/dev/urandom of=/dev/{disk} bs=1M count=4 oflag=direct conv=fsync 2>/dev/null")
    guest.sh(f"dd if=/dev/{disk} bs=1M count=4 iflag=direct 2>/dev/null | cmp -n 4M - {DISK}")
    guest.sh(f"blkdiscard -o 0 -l 1M /dev/{disk} && blkdiscard -z -o 1M -l 1M /dev/{disk}")
    guest.sh(f"dd if=/dev/{disk} bs=1M count=2 iflag=direct 2>/dev/null | cmp -n 2M - /dev/zero")
    after = server.count(export)
    for kind in "read", "write", "flush", "discard", "write_zeroes":
        assert int(after[kind]) > int(before[kind]), f"{kind}: {before} and then {after}"
    assert after["failed"] == before["failed"], after
    # What the kernel does not send by itself.
    guest.sh(f"dd if=/dev/{disk} of=/run/blocks bs=4k skip=512 count=1 2>/dev/null")
    compare = f"nvme compare /dev/{disk} -s 4096 -c 7 -z 4096 -d"
    guest.sh(f"{compare} /run/blocks && nvme verify /dev/{disk} -s 4096 -c 7 && nvme flush /dev/{disk} -n 1")
    guest.sh(f"nvme copy /dev/{disk} --sdlba=0 --slbs=4096 --blocks=7")
    guest.sh(f"dd if=/dev/{disk} bs=4k count=1 iflag=direct 2>/dev/null | cmp - /run/blocks")
    # What the copy has brought back, and what was not discarded: the file system of the file has no other zeroes.
    allocated = _allocated(guest, disk, 4 * MIB)
    assert allocated == [(0, 8), (2048, 6144)], allocated
    code, output = guest.sh(f"{compare} /dev/zero 2>&1", check=False)
    assert code != 0 and "Compare" in output, output
    for page in "smart-log", "error-log", "fw-log", "effects-log", "changed-ns-list-log":
        guest.sh(f"nvme {page} /dev/nvme0")
    code, _ = guest.sh(f"dd if=/dev/zero of=/dev/{_disk(guest, 2)} bs=4k count=1 oflag=direct", check=False)
    assert code != 0, "a read-only namespace was written to"


def _allocated(guest, disk, length):
    """The allocated ranges of the first `length` bytes, by Get LBA Status: first block and number of blocks."""
    # `nvme get-lba-status` of libnvme 1.3 sends the command without a buffer.
    command = f"nvme admin-passthru /dev/{disk} --opcode=0x86 --namespace-id=1 --read --raw-binary --data-len=4096 --cdw12=1023"
    answer = bytes.fromhex(guest.sh(f"{command} --cdw13={2 << 24 | length // 512} 2>/dev/null | od -An -v -tx1"))
    (count,) = struct.unpack_from("<I", answer)
    descriptors = [struct.unpack_from("<QI", answer, 8 + 16 * number) for number in range(count)]
    return [(first, one_less + 1) for first, one_less in descriptors]


def _a_namespace_that_grows_is_noticed(guest, server, disk):
    guest.sh(f"truncate -s {(DISK_MIB + 16) * MIB} {DISK}; kill -HUP $(cat /run/server.pid)")
    sectors = (DISK_MIB + 16) * MIB // 512
    guest.sh(f"for i in $(seq 100); do [ $(cat /sys/block/{disk}/size) = {sectors} ] && exit 0; sleep 0.1; done; exit 1")


@needs_freestone
@nightly
def a_hundred_subsystems_at_one_port_are_connected_at_once(lab):
    guest = _boot(lab)
    exports = [f"--export nvme-tcp:listen=127.0.0.1:4420,nqn={NQN}:{number},hosts={HOST},device=ram" for number in range(SUBSYSTEMS)]
    exports.append(f"--export nvme-tcp:listen=127.0.0.1:4420,nqn={NQN}:other,hosts={HOST}0,device=ram")
    # Each queue is sure of 1 MiB, of which it uses little here; the guest has less than they all.
    server = UblkServer(guest, f"--device mem:size=4M,id=ram {' '.join(exports)} --memory 1G --cores 0,1")
    server.start()
    guest.sh(f"nvme connect-all {AT} --hostnqn {HOST} --hostid {HOST_ID} -i 1 --reconnect-delay 1 --ctrl-loss-tmo 600")
    names = guest.sh("cat /sys/class/nvme/nvme*/subsysnqn").split()
    assert sorted(names) == sorted(f"{NQN}:{number}" for number in range(SUBSYSTEMS)), names
    # Disks appear some time after their controllers. All show the same bytes.
    guest.sh(f"for i in $(seq 600); do [ $(ls /dev/nvme*n1 | wc -l) = {SUBSYSTEMS} ] && exit 0; sleep 0.1; done; ls /dev/nvme*n1; exit 1")
    for text in "mark", "back":
        guest.sh(f"printf {text} | dd of=$(ls /dev/nvme*n1 | head -1) bs=4k count=1 oflag=direct conv=sync,nocreat 2>/dev/null")
        read = guest.sh("for disk in /dev/nvme*n1; do dd if=$disk bs=4k count=1 iflag=direct 2>/dev/null | head -c 4; echo; done | sort | uniq -c")
        assert read.split() == [str(SUBSYSTEMS), text], read
        # Requests wait until their hosts have reconnected.
        server.kill()
        server.start()
    guest.sh("nvme disconnect-all")
    server.stop()


@needs_freestone
def a_target_that_is_killed_under_load_and_comes_back_has_lost_nothing(lab):
    guest = _boot(lab)
    server = UblkServer(guest, f"{SLOW_FILE} {EXPORT} --cores 0,1")
    server.start()
    disk = _connect_to(guest, "-g -G -i 2 --reconnect-delay 1 --ctrl-loss-tmo 600")
    guest.modprobe("ext4")
    guest.sh(f"mkfs.ext4 -q -F /dev/{disk} && mkdir -p /mnt/disk && mount /dev/{disk} /mnt/disk")
    spread = f"--numjobs=2 --offset_increment={LOAD_MIB // 2}m --rate_iops={LOAD_IOPS // 2}"
    # Linux 6.12 sends in the context of whoever submits, without MSG_NOSIGNAL: a connection that breaks is a SIGPIPE for it.
    load = guest.start("load", "trap '' PIPE; " + fio_verify_until_enough("/mnt/disk/file", f"{LOAD_MIB // 2}m", spread))
    # The disk over all paths does not count what waits for one; the layer's delay keeps commands on their way.
    kills = kill_under_load(server, load, KILLS, every_s=1, down_s=0.5, disk=disk)
    guest.sh(f"umount /mnt/disk && e2fsck -f -n /dev/{disk}")
    guest.sh(f"nvme disconnect -n {NQN}")
    server.stop()
    guest.sh(f"e2fsck -f -n {DISK}")
    # The kernel says that it reconnects; nothing else may have gone wrong.
    guest.sh("dmesg -C")
    return f"{len(kills)} kills"


@needs_freestone
def with_two_ports_io_goes_the_best_way_and_the_other_when_that_is_lost(lab):
    guest = _boot(lab)
    guest.sh(f"ip addr add {SECOND_ADDRESS}/32 dev lo")
    ports = f"listen=127.0.0.1:4420@non-optimized+{SECOND_ADDRESS}:4420"
    server = UblkServer(guest, f"{SLOW_FILE} --export nvme-tcp:{ports},nqn={NQN} --cores 0,1")
    server.start()
    said = json.loads(guest.sh(f"nvme discover {AT} --hostnqn {HOST} --hostid {HOST_ID} -o json"))
    found = {(record["traddr"], record["portid"]) for record in said["records"] if record["subtype"] == "nvme subsystem"}
    assert found == {("127.0.0.1", 1), (SECOND_ADDRESS, 2)}, said
    options = "-i 2 --keep-alive-tmo 3 --reconnect-delay 1 --ctrl-loss-tmo 600"
    guest.sh(_connect(options))
    guest.sh(_connect(options, at=f"-t tcp -a {SECOND_ADDRESS} -s 4420"))
    disk = _disk(guest, 1)
    # One disk with two ways, numbered as they came.
    states = [guest.sh(f"cat /sys/block/nvme0c{path}n1/ana_state").strip() for path in (0, 1)]
    assert states == ["non-optimized", "optimized"], states
    assert guest.sh("ls -d /dev/nvme*n1").split() == [f"/dev/{disk}"]

    def done():
        """Requests that went each way."""
        return [requests_completed(guest, f"nvme0c{path}n1") for path in (0, 1)]

    before = done()
    load = guest.start("load", "trap '' PIPE; " + fio_verify_until_enough(f"/dev/{disk}", "8m", f"--rate_iops={LOAD_IOPS}"))

    def goes(path, since):
        """Waits for I/O that goes this way."""
        guest.sh(_until(f"[ $(awk '{{print $1 + $5}}' /sys/block/nvme0c{path}n1/stat) -gt $(({since[path]} + 100)) ]", 60))
        return done()

    best = goes(1, before)
    assert best[0] == before[0], f"{before}, then {best}: not the best way"
    guest.sh(f"ip addr del {SECOND_ADDRESS}/32 dev lo")
    goes(0, best)
    guest.sh(f"ip addr add {SECOND_ADDRESS}/32 dev lo")
    guest.sh(_until("[ $(cat /sys/class/nvme/nvme1/state) = live ]", 60))
    lost = done()
    back = goes(1, lost)
    end_of_load(load)
    guest.sh(f"nvme disconnect -n {NQN}")
    server.stop()
    # The kernel says that a path is lost; nothing else may have gone wrong.
    guest.sh("dmesg -C")
    return f"requests each way: {best} before, {lost} while one is lost, {back} after"


@needs_freestone
@nightly
def the_stock_initiator_proves_who_it_is_with_every_hash(lab):
    guest = _boot(lab)
    secret, ours = _secrets(guest)
    other = guest.sh(f"nvme gen-dhchap-key -m 1 -n {HOST}").strip()
    for hash_name, group in PROOFS:
        server = UblkServer(guest, f"{FILE} {EXPORT},auth-keys=/run/keys,auth-hashes={hash_name},auth-groups={group} --cores 0,1")
        server.start()
        guest.sh("dmesg -C")
        for options in f"-S {secret}", f"-S {secret} -C {ours} -g -G":
            disk = _connect_to(guest, options)
            guest.sh(fio_verify(f"/dev/{disk}", "2m", "--bsrange=512-64k --bs_unaligned=0 --ba=512"))
            guest.sh(f"nvme disconnect -n {NQN}")
        said = guest.sh("dmesg")
        assert said.count(f"authenticated with hash hmac({hash_name}) dhgroup {group}") == 2, said
        assert said.count("controller authenticated") == 1, said
        assert guest.sh("grep -c 'host authenticated' /run/server.out").strip() == "6", "an admin queue and two others, twice"
        for wrong in "", f"-S {other}", f"-S {secret} -C {other}":
            code, output = guest.sh(_connect(wrong), check=False)
            assert code != 0, output
        said = json.loads(guest.sh(f"nvme discover {AT} --hostnqn {HOST} --hostid {HOST_ID} -o json"))
        assert NQN in [record["subnqn"] for record in said["records"]], said
        guest.sh("! ls /dev/nvme0* 2>/dev/null")
        server.stop()
    # The kernel says who was refused; nothing else may have gone wrong.
    guest.sh("dmesg -C")


@needs_freestone
@nightly
def a_target_that_comes_back_has_its_host_prove_itself_again(lab):
    guest = _boot(lab)
    secret, ours = _secrets(guest)
    server = UblkServer(guest, f"{SLOW_FILE} {EXPORT},auth-keys=/run/keys --cores 0,1 --sandbox required")
    server.start()
    disk = _connect_to(guest, f"-S {secret} -C {ours} -i 2 --reconnect-delay 1 --ctrl-loss-tmo 600")
    load = guest.start("load", "trap '' PIPE; " + fio_verify_until_enough(f"/dev/{disk}", "12m", f"--rate_iops={LOAD_IOPS}"))
    kills = len(kill_under_load(server, load, 2, every_s=1, down_s=0.5, disk=disk))
    # A host whose connection fails after the proof proves itself once more.
    proofs = guest.sh("dmesg").count("controller authenticated")
    assert proofs > kills, f"the host proved itself {proofs} times, with {kills} kills of its target"
    guest.sh(f"nvme disconnect -n {NQN}")
    server.stop()
    guest.sh("dmesg -C")


@needs_freestone
def hosts_that_share_a_disk_agree_on_who_writes(lab):
    guest = _boot(lab, "multipath=N")  # so that two hosts in one kernel have a disk each
    guest.sh(f"ip addr add {SECOND_ADDRESS}/32 dev lo")
    server = UblkServer(guest, f"{FILE} --export nvme-tcp:listen=127.0.0.1:4420+{SECOND_ADDRESS}:4420,nqn={NQN}"
                        ",reservations=/dev/shm/reservations --cores 0,1")
    server.start()
    options = "-i 2 --reconnect-delay 1 --ctrl-loss-tmo 600"
    for number, address in (1, "127.0.0.1"), (2, SECOND_ADDRESS):
        at = f"-t tcp -a {address} -s 4420"
        guest.sh(_connect(options, host=_host(number), host_id=_host_id(number), at=at))
    guest.sh(_until("[ $(ls -d /dev/nvme[01]n* | wc -l) = 2 ]", 20))
    disks = guest.sh("ls /sys/block | grep nvme").split()
    one, two = (f"/dev/{next(disk for disk in disks if disk.startswith(f'nvme{n}'))}" for n in (0, 1))
    write = "dd if=/dev/urandom of={} bs=64k count=16 oflag=direct,sync status=none"
    # The kernel's own way, which wants registrations to outlive a loss of power; nvme-cli's is the other.
    guest.sh(_kernel_reserves(one, key=0xa, kind=1))
    guest.sh(f"nvme resv-register {two} --nrkey=0xb --rrega=0")
    guest.sh(write.format(one))
    assert guest.sh(write.format(two), check=False)[0] != 0, "two hosts write"
    guest.sh(f"dd if={two} bs=1M count=1 iflag=direct status=none | cmp -n 1M - {DISK}")
    report = json.loads(guest.sh(f"nvme resv-report {two} --eds -o json"))
    held = {(entry["rkey"], entry["rcsts"]) for entry in report["regctlext"]}
    assert (report["rtype"], report["ptpls"], held) == (1, 1, {(0xa, 1), (0xb, 0)}), report
    # It outlives its server.
    server.kill()
    server.start()
    guest.sh(_until(write.format(one), 30))
    assert guest.sh(write.format(two), check=False)[0] != 0, "two hosts write"
    # One is taken for dead, and is not: what it still has on its way must not land behind the back of the other.
    load = guest.start("load", f"while {write.format(one)}; do :; done")
    time.sleep(1)
    guest.sh(f"nvme resv-acquire {two} --crkey=0xb --prkey=0xa --rtype=3 --racqa=2")
    guest.sh(f"dd if=/dev/zero of={two} bs=1M count=1 oflag=direct,sync status=none")
    load.wait(timeout_s=60)
    guest.sh(f"cmp -n 1M {DISK} /dev/zero && ! {write.format(one)}")
    log = guest.sh("nvme get-log /dev/nvme0 --log-id=0x80 --log-len=64 -b | od -An -tu1 -j8 -N1").strip()
    assert log == "1", f"the host was told {log}, not that its registration is gone"
    guest.sh(f"nvme resv-release {two} --crkey=0xb --rtype=3 --rrela=0 && {write.format(one)}")
    guest.sh(f"nvme disconnect -n {NQN}")
    server.stop()
    said = guest.sh("dmesg -c")
    assert "reservation conflict" in said.lower() or "critical nexus" in said, said


@needs_freestone
def the_stock_initiator_comes_through_tls(lab):
    guest = _boot(lab)
    tls = TlsDaemon(guest)
    key = tls.make_key()
    guest.sh(f"umask 077; echo {HOST} {key} >/run/keys")
    server = UblkServer(guest, f"{SLOW_FILE} {EXPORT},tls-keys=/run/keys --cores 0,1")
    server.start()
    code, output = guest.sh(_connect(), check=False)
    assert code != 0, f"a host may come without TLS: {output}"
    guest.sh("dmesg -C")
    for identity in 0, 1:
        guest.sh(f"nvme disconnect -n {NQN}")
        tls.insert(key, HOST, NQN, identity)
        guest.sh(_connect("--tls -i 2 --reconnect-delay 1 --ctrl-loss-tmo 600", nvme=tls.nvme))
        disk = f"/dev/{_disk(guest, 1)}"
        guest.sh(fio_verify(disk, "2m", "--bsrange=512-256k --bs_unaligned=0 --ba=512"))
    assert guest.sh("cat /run/server.out").count("TLSv1.3") == 6, "three queues, twice"
    file = (disk, "8m", f"--rate_iops={LOAD_IOPS}")
    load = guest.start("load", "trap '' PIPE; " + fio_verify_until_enough(*file))
    kill_under_load(server, load, TLS_KILLS, every_s=1, down_s=0.5, disk=os.path.basename(disk))
    guest.sh(f"nvme disconnect -n {NQN}")
    server.stop()
    guest.sh("dmesg -C")


def _host(number):
    return f"nqn.2014-08.org.nvmexpress:uuid:{_host_id(number)}"


def _host_id(number):
    return f"4c1d5d0e-6b8f-4d68-8a0a-0d0e6a1b2c0{number}"


def _kernel_reserves(disk, key, kind):
    """Registers a key and takes a reservation (include/uapi/linux/pr.h)."""
    return f"""python3 -c '
import fcntl, struct
with open("{disk}", "rb+", buffering=0) as disk:
    fcntl.ioctl(disk, 0x401870c8, struct.pack("QQII", 0, {key}, 0, 0))
    fcntl.ioctl(disk, 0x401070c9, struct.pack("QII", {key}, {kind}, 0))
'"""


def _secrets(guest):
    """Puts the secrets of the host and of the target into /run/keys."""
    host, target = guest.sh(f"nvme gen-dhchap-key -m 2 -n {HOST}; nvme gen-dhchap-key -m 0").split()
    guest.sh(f"nvme check-dhchap-key -k {host} && nvme check-dhchap-key -k {target}")
    guest.sh(f"umask 077; echo '{HOST} {host} {target}' >/run/keys")
    return host, target


def _until(condition, seconds):
    return f"for i in $(seq {10 * seconds}); do {condition} && exit 0; sleep 0.1; done; exit 1"


def _connect(options="", host=HOST, host_id=HOST_ID, at=AT, nvme="nvme"):
    return f"{nvme} connect {at} -n {NQN} --hostnqn {host} --hostid {host_id} {options}"


def _connect_to(guest, options):
    """Connects, and returns the disk that is namespace 1."""
    guest.sh(_connect(options))
    return _disk(guest, 1)


def _disk(guest, nsid):
    """The disk that is this namespace, once it is there: the kernel numbers disks as it finds them."""
    find = f"grep -lx {nsid} /sys/block/nvme0n*/nsid 2>/dev/null"
    path = guest.sh(f"for i in $(seq 100); do {find} && exit 0; sleep 0.1; done; exit 1").strip()
    name = os.path.basename(os.path.dirname(path))
    guest.sh(f"for i in $(seq 100); do [ -b /dev/{name} ] && exit 0; sleep 0.1; done; exit 1")
    return name


def _boot(lab, core_options=""):
    guest = lab.boot_alone(cpus=2)
    guest.sh(f"modprobe nvme-core {core_options} && modprobe nvme-tcp")
    guest.sh(f"ip link set lo up; truncate -s {DISK_MIB * MIB} {DISK}")
    return guest

"""An NVMe/TCP target of the guest's own kernel (nvmet-tcp), on its loopback interface.

    target = KernelTarget(guest, size_mib=64)
    target.address, target.nqn      # what a client connects to
    target.close()                  # every connection ends, and no host can connect
    target.open()
    target.resize(96)               # clients are told
"""

import os

import blkio
from workload import MIB

CONFIG = "/sys/kernel/config/nvmet"
# How hosts and targets prove who they are: every hash, with LAB_PROOFS=all every group, too. An emulated processor needs
# seconds for a secret of 8192 bits.
PROOFS = [("sha256", "null"), ("sha384", "ffdhe2048"), ("sha512", "ffdhe3072")]
if os.environ.get("LAB_PROOFS") == "all":
    PROOFS += [("sha256", "ffdhe4096"), ("sha384", "ffdhe6144"), ("sha512", "ffdhe8192")]


class TlsDaemon:
    """tlshd, which performs TLS handshakes for hosts and targets of the guest's kernel, with keys of its keyring."""

    def __init__(self, guest):
        blkio.require_trixie()
        self.guest, self.nvme = guest, f"{blkio.TRIXIE_BIN}/nvme"
        # The daemon looks for the keyring at its start.
        guest.sh("modprobe -a tls nvme-keyring; echo -e '[authenticate]\nkeyrings=.nvme' >/run/tlshd.conf")
        guest.start("tlshd", f"exec {blkio.TRIXIE_BIN}/tlshd -s -c /run/tlshd.conf")
        # The kernel refuses a handshake (ESRCH) until the daemon has joined the group of the generic netlink family
        # (protocol 16).
        guest.sh("until awk '$2 == 16 && $4 !~ /^0*$/ { joined = 1 } END { exit !joined }' /proc/net/netlink; do sleep 0.1; done", 60)

    def make_key(self):
        """The text of a new key."""
        return self.guest.sh(f"{self.nvme} gen-tls-key --hmac=1").strip()

    def insert(self, key, host, subsystem, identity):
        """Puts a key into the keyring: identity 0 is that of version 1.0 of the transport's specification, 1 of the next."""
        names = f"--hostnqn={host} --subsysnqn={subsystem}"
        self.guest.sh(f"{self.nvme} check-tls-key --identity={identity} --keydata={key} {names} --insert")


class KernelTarget:
    nqn = "nqn.2014-08.org.example:lab"

    def __init__(self, guest, size_mib=64, block_device=False, port=4420, tls=False):
        """block_device: the namespace is a loop device, not the file itself, or the device with this name. It lies in the
        guest's memory. tls: hosts need TLS, for which a TlsDaemon performs the handshakes."""
        self.guest, self.address, self.file = guest, f"127.0.0.1:{port}", f"/dev/shm/nvmet-{port}"
        self._subsystem = f"{CONFIG}/subsystems/{self.nqn}-{port}"
        self._namespace = f"{self._subsystem}/namespaces/1"
        self._port = f"{CONFIG}/ports/{port}"
        self.nqn = f"{self.nqn}-{port}"
        guest.modprobe("configfs", "nvmet", "nvmet-tcp", "loop")
        guest.sh("ip link set lo up; mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config")
        if isinstance(block_device, str):
            path = block_device
        else:
            guest.sh(f"truncate -s {size_mib * MIB} {self.file}")
            path = guest.sh(f"losetup --show -f {self.file}").strip() if block_device else self.file
        self._write(self._subsystem, attr_allow_any_host=1)
        # A file in memory cannot be opened past the page cache.
        buffered = {} if block_device else {"buffered_io": 1}
        self._write(self._namespace, device_path=path, **buffered)
        self._write(self._namespace, enable=1)
        security = {"addr_tsas": "tls1.3"} if tls else {}
        self._write(self._port, addr_trtype="tcp", addr_adrfam="ipv4", addr_traddr="127.0.0.1", addr_trsvcid=port, **security)
        self.open()

    @property
    def device(self):
        """The device, as Freestone is told of it."""
        return f"nvme-tcp:address={self.address},nqn={self.nqn}"

    def open(self):
        self.guest.sh(f"ln -s {self._subsystem} {self._port}/subsystems/{self.nqn}")

    def close(self):
        self.guest.sh(f"rm {self._port}/subsystems/{self.nqn}")

    def ask_for_proof(self, host, secret, ours=None, hash_name="sha256", group="null"):
        """From now on only this host may connect, and has to prove that it knows the secret."""
        entry = f"{CONFIG}/hosts/{host}"
        keys = {"dhchap_key": secret, "dhchap_hash": f"'hmac({hash_name})'", "dhchap_dhgroup": group}
        self._write(entry, **keys, **({"dhchap_ctrl_key": ours} if ours else {}))
        self._write(self._subsystem, attr_allow_any_host=0)
        allowed = f"{self._subsystem}/allowed_hosts/{host}"
        self.guest.sh(f"[ -e {allowed} ] || ln -s {entry} {allowed}")

    def remove(self):
        """Nothing is left of it but its file."""
        self.close()
        self.guest.sh(f"echo 0 >{self._namespace}/enable; rmdir {self._port} {self._namespace} {self._subsystem}")

    def resize(self, size_mib):
        self.guest.sh(f"truncate -s {size_mib * MIB} {self.file}; echo 1 >{self._namespace}/revalidate_size")

    def _write(self, directory, **values):
        """Make a directory of configfs, if it is not there, and write its attributes."""
        words = "; ".join(f"echo {value} >{directory}/{name}" for name, value in values.items())
        self.guest.sh(f"mkdir -p {directory}; {words}")

"""`freestone serve` in a guest, with disks of the guest's own kernel (/dev/ublkbN).

    server = UblkServer(guest, "--device mem:size=64M --export ublk:id=0,queues=2")
    server.start()
    server.kill()      # -9: the disks wait
    server.start()     # and go on
    server.stop()      # SIGTERM: the disks are removed
"""

import itertools
import json

import paths

READY_TIMEOUT_S = 60
STOP_TIMEOUT_S = 60


class UblkServer:
    def __init__(self, guest, arguments, name="server", command="serve", uid=0):
        """The module must be loaded. name: of the job in the guest, whose output is /run/NAME.out. command: any that
        serves. uid: of the user and the group who run it."""
        self.guest, self.arguments, self.name, self.job = guest, arguments, name, None
        self.program = f"{as_user(uid)} {paths.FREESTONE} {command}"

    def start(self):
        """Start the server and return when its disks are there."""
        self._begin()
        self._wait_for(f"grep -q ^ready /run/{self.name}.out || [ -e /run/{self.name}.code ]", READY_TIMEOUT_S)
        code, output = self.guest.sh(f"cat /run/{self.name}.out; grep -q ^ready /run/{self.name}.out", check=False)
        assert code == 0, f"the server did not get ready:\n{output}"

    def start_and_kill(self, after_s):
        """Start the server and kill -9 it, ready or not; returns whether it was."""
        self._begin(f"(sleep {after_s}; kill -9 $SERVER) &")
        self._wait_for(f"[ -e /run/{self.name}.code ]", STOP_TIMEOUT_S)
        return self.guest.sh(f"grep -q ^ready /run/{self.name}.out", check=False)[0] == 0

    def kill(self):
        """kill -9, by its own pid; returns when the process is gone."""
        self._signal("KILL")
        self._wait_for(f"[ -e /run/{self.name}.code ]", STOP_TIMEOUT_S)

    def stop(self):
        """SIGTERM; raises unless the server ends by itself with code 0."""
        self._signal("TERM")
        return self.job.wait(STOP_TIMEOUT_S)

    def count(self, export):
        """What the export has counted so far."""
        said = int(self.guest.sh(f"wc -l </run/{self.name}.out"))
        self._signal("USR1")
        title, new = f"stats of export {export}", f"tail -n +{said + 1} /run/{self.name}.out"
        self._wait_for(f"{new} | sed -n '/^{title}$/,$ p' | grep -q '^  connected'", READY_TIMEOUT_S)
        lines = self.guest.sh(new).splitlines()
        counts = itertools.takewhile(lambda line: line.startswith("  "), lines[lines.index(title) + 1:])
        return dict(line.split() for line in counts)

    def _begin(self, first=""):
        self.job = self.guest.start(
            self.name, f"SERVER=$BASHPID; echo $SERVER >/run/{self.name}.pid; {first}"
                       f" exec {self.program} {self.arguments}")

    def _signal(self, name):
        self.guest.sh(f"kill -{name} $(cat /run/{self.name}.pid)")

    def _wait_for(self, condition, timeout_s):
        self.guest.sh(f"for i in $(seq {timeout_s * 20}); do if {condition}; then exit 0; fi; sleep 0.05; done; exit 1",
                      timeout_s=2 * timeout_s)


def requeued(guest, disk):
    """How many requests a dead server had, which the kernel will hand out again."""
    return len(guest.sh(f"cat /sys/kernel/debug/block/{disk}/requeue_list").splitlines())


def as_user(uid):
    """What stands before a command of this user."""
    return f"setpriv --reuid {uid} --regid {uid} --clear-groups" if uid else ""


def ublk(guest, arguments, uid=0):
    """Run `freestone ublk … --json` in the guest and return what it says, one object for each line."""
    lines = guest.sh(f"{as_user(uid)} {paths.FREESTONE} ublk {arguments} --json").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def ublk_fails(guest, arguments, command="ublk", uid=0):
    """Run `freestone ublk …`, which must fail, and return what it says."""
    code, output = guest.sh(f"timeout 60 {as_user(uid)} {paths.FREESTONE} {command} {arguments}", check=False)
    assert code in (1, 2), f"{arguments}: exit code {code}\n{output}"
    return output

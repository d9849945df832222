"""`freestone serve` on an array of files, and `freestone array` beside it.

    with RaidServer(directory, "6", members=6, member_mib=96) as server:
        server.array("fail", server.array_name, "2")
        server.show()["state"]
        server.stop()      # and `array check` and `raid-check` on the members, which must be clean
"""

import json
import os
import subprocess

import paths
from server import Server, ServerError
from workload import MIB, make_image


def raid_check(members):
    """Run the independent checker on the members of stopped arrays; returns what it printed. Raises on any finding."""
    done = subprocess.run([paths.RAID_CHECK, *members], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise ServerError(f"raid-check {' '.join(members)}: code {done.returncode}\n{done.stdout}")
    return done.stdout


class RaidServer(Server):
    array_name = "lab"

    def __init__(self, directory, level, members, member_mib, queues=2, create_options=()):
        self.member_directory = os.path.join(directory, "members")
        os.makedirs(self.member_directory, exist_ok=True)
        super().__init__(None, queues, os.path.join(directory, "server.log"))
        self.member_mib, self.members = member_mib, []
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": self.directory}
        members = [self.new_member() for _ in range(members)]
        self.array("create", self.array_name, "--level", level, *create_options, *members)

    def new_member(self):
        """Another empty file."""
        path = os.path.join(self.member_directory, f"{len(self.members)}.img")
        self.members.append(make_image(path, self.member_mib * MIB))
        return path

    def lose_member(self, number):
        """Move a member's file to where no server looks for it."""
        path = os.path.join(self.member_directory, "..", f"lost-{number}.img")
        os.rename(self.members[number], path)
        self.members[number] = path

    def command(self):
        return [
            paths.FREESTONE, "serve",
            "--device", f"raid:name={self.array_name},scan={self.member_directory}",
            "--export", f"vhost-user-blk:socket={self.socket},queues={self.queues}",
            "--cores", self.cores,
        ]

    def array(self, *arguments):
        """Run `freestone array` and return its JSON objects."""
        done = subprocess.run([paths.FREESTONE, "array", *arguments, "--json"], env=self.environment,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise ServerError(f"freestone array {' '.join(arguments)}: code {done.returncode}\n{done.stdout}{done.stderr}")
        return [json.loads(line) for line in done.stdout.splitlines()]

    def show(self):
        return self.array("show", self.array_name)[0]

    def stop(self):
        """SIGTERM; then the members are checked on the host, by the engine and by raid-check, and must be clean."""
        super().stop()
        self.array("check", "--name", self.array_name, "--scan", self.member_directory)
        raid_check([path for path in self.members if os.path.dirname(path) == self.member_directory])

    def __exit__(self, *exc):
        super().__exit__(*exc)
        for path in self.members:
            os.unlink(path)

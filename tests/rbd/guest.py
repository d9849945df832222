"""A virtual machine whose disk is an image: freestone serves it over vhost-user-blk."""
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "lab"))
import paths  # noqa: E402 # after the path to it
from server import Server  # noqa: E402
from vm import Disk, Guest  # noqa: E402
from workload import end_of_load, fio_verify_again, fio_verify_until_enough, kernel_errors, requests_completed  # noqa: E402

PROGRESS_TIMEOUT_S = 60
# Requests after which a load has made progress.
PROGRESS = 20


class DiskServer(Server):
    """`freestone serve` with an image; a killed one is followed by another at once."""

    def __init__(self, lab, image):
        super().__init__(image, log=str(lab.cluster.directory / f"{image}.log"))
        self.lab, self.environment = lab, lab.env

    def command(self):
        device = self.lab.device(self.image, f",lock-file={self.directory}/lock")
        return [paths.FREESTONE, "serve", "--device", device, "--export", f"vhost-user-blk:socket={self.socket}",
                "--sandbox", "required", *self.lab.sandbox_paths()]


def wait_for_requests(guest, load, disk):
    """Waits until requests of a load complete on a disk of the guest."""
    start = requests_completed(guest, disk)
    deadline = time.monotonic() + PROGRESS_TIMEOUT_S
    while requests_completed(guest, disk) < start + PROGRESS:
        assert load.is_running(), load.wait()
        assert time.monotonic() < deadline, f"no request completes on {disk}: {guest.sh('dmesg | tail -20')}"
        time.sleep(0.2)


def a_guest_keeps_its_data_while_the_osd_restarts_and_its_server_is_killed(lab):
    image, directory = lab.image("guest-disk", "64M"), lab.cluster.directory / "guest-disk"
    directory.mkdir()
    with DiskServer(lab, image) as server, Guest([Disk(server.socket)], directory=str(directory)) as guest:
        guest.attach_disks()
        load = guest.start("load", fio_verify_until_enough("/dev/vda", "4m", "--rate_iops=200"))
        wait_for_requests(guest, load, "vda")
        lab.cluster.restart_osd(lab.osd_stop_s)
        wait_for_requests(guest, load, "vda")
        server.kill()
        server.start()
        wait_for_requests(guest, load, "vda")
        end_of_load(load)
        guest.sh(fio_verify_again("/dev/vda", "4m"))
        errors = kernel_errors(guest)
        assert not errors, errors
        guest.close()
        server.stop()


CASES = [a_guest_keeps_its_data_while_the_osd_restarts_and_its_server_is_killed]

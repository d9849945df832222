"""The lab itself: a guest that does not run is told from a command that takes long."""

from lab import Guest
from vm import EmulatorError, GuestError


def a_guest_that_does_not_run_is_a_failure_of_the_emulator(lab):
    with Guest(directory=lab.directory) as guest:
        assert type(_error_of(guest, "sleep 1000")) is GuestError
        guest.qmp("stop")
        guest.interrupt_timeout_s = 2
        assert type(_error_of(guest, "true")) is EmulatorError


def _error_of(guest, script):
    try:
        guest.sh(script, timeout_s=2)
    except GuestError as error:
        return error
    raise AssertionError(f"{script} ended")

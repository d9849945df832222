"""The lab itself: a guest that does not run is told from a command that takes long."""

from lab import Guest
from vm import EmulatorError, GuestError


def a_guest_that_does_not_run_is_a_failure_of_the_emulator(lab):
    with Guest(directory=lab.directory) as guest:
        assert _error_of(guest, "sleep 1000").__class__ is GuestError
    with Guest(directory=lab.directory) as guest:
        guest.qmp("stop")
        guest.interrupt_timeout_s = 2
        assert _error_of(guest, "true").__class__ is EmulatorError


def _error_of(guest, script):
    try:
        guest.sh(script, timeout_s=2)
    except GuestError as error:
        return error
    raise AssertionError(f"{script} ended")

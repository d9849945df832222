"""What goes wrong: exceptions with an errno and a sentence."""


class Error(OSError):
    """An error of the library or a device: `errno` and `strerror`."""


class UnknownPropertyError(Error, KeyError):
    """A property that the driver does not have."""

class ClosedError(Error, ValueError):
    """Something was used after its `close()`."""

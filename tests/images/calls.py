"""Calls of QEMU's programs, as their stand-ins note them: the file $IMAGES_CALLS gets a line for each, with the test,
`ours` or `theirs`, and the number of commands or the reason."""

import os


class Theirs(Exception):
    """The call goes to QEMU's program; the text is the reason."""


def test():
    """The name of the test that runs."""
    return os.environ.get("IMAGES_TEST", os.path.basename(os.environ.get("TEST_DIR", "?")))


def note(who, text):
    with open(os.environ["IMAGES_CALLS"], "a") as calls:
        calls.write(f"{test()}\t{who}\t{text}\n")

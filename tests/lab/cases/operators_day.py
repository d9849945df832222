"""freestoned, as an operator uses it for a day: create, export, grow, limit, lose a disk, be killed, be upgraded, delete."""

import os

from day import Day
from freestoned import Freestoned
from lab import needs_freestone
from runner import nightly


@nightly
@needs_freestone
def an_operators_day_ends_without_a_lost_byte(lab):
    os.makedirs(lab.directory, exist_ok=True)
    daemon = Freestoned(lab.scratch(), "--member-timeout", "1")
    lab.callback(daemon.close)
    daemon.start()
    lines = []
    day = Day(daemon, lab.directory, lines.append)
    lab.callback(day.close)
    lab.parts.append(day)
    day.run()
    daemon.stop()
    log = daemon.log()
    assert "panicked" not in log, log
    return "\n".join(lines)

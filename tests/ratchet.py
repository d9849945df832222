"""Numbers that only fall: a check holds each of its areas below the number that a file has for it."""
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Ratchet:
    """The file `path`, with a line `AREA NUMBER` for each area of the check `command`; other areas have 0."""

    def __init__(self, path, command, unit):
        self.path, self.command, self.unit = path, command, unit
        lines = [line.split() for line in (ROOT / path).read_text().splitlines() if not line.startswith("#")]
        self.may_have = {area: int(number) for area, number in lines}

    def problems(self, has, is_update, see):
        """Yields a line for each area that has more than its number; `see` names the command that lists them."""
        for area, number in sorted(has.items()):
            most = self.may_have.get(area, 0)
            if number > most:
                yield f"{area}: {number} {self.unit}, at most {most}: see {see.format(area=area)}"
            elif number < most and not is_update:
                print(f"{area}: {number} {self.unit}, {most} in {self.path}: please run {self.command} --update")

    def lower(self, has):
        """Writes the present numbers of these areas, where they are lower."""
        head = f"# The {self.unit} that each area may have. The numbers only fall: {self.command} --update\n"
        numbers = {area: min(number, self.may_have.get(area, 0)) for area, number in sorted(has.items())}
        (ROOT / self.path).write_text(head + "".join(f"{area} {number}\n" for area, number in numbers.items()))

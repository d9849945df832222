"""Finds tests, runs them and reports: what tests/lab/run and tests/clients/run share.

A test is a function in a file of a folder `cases` whose only parameter has the name of its suite ("lab", "client"); its
own name is a sentence. It gets a new object of the suite's class: `directory` (its logs), check_end(), close(), logs().
It fails by raising, and is skipped when it raises Skipped; what it returns is printed."""

import argparse
import dataclasses
import faulthandler
import glob
import importlib
import inspect
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback

from paths import die_with_parent
from vm import EmulatorError, exit_on_sigterm

# A test takes 10 to 60 s on a quiet machine, many times that on a busy one.
TEST_TIMEOUT_S = int(os.environ.get("LAB_TEST_TIMEOUT_S", "600"))
STUCK_S = 60  # how much later a test that its signal did not end is stuck


class Skipped(Exception):
    """This test cannot run here; the text says why."""


def nightly(test):
    """Marks a test that runs with --nightly, or when a word on the command line selects it."""
    test.is_nightly = True
    return test


def find_tests(cases, parameter):
    """(file, function) of every test in the folder, in the order of the files."""
    sys.path.insert(0, cases)
    tests = []
    for path in sorted(glob.glob(os.path.join(cases, "*.py"))):
        module = importlib.import_module(os.path.basename(path)[:-len(".py")])
        source = getattr(module, "__file__", None)
        if not source or not os.path.samefile(source, path):
            sys.exit(f"{path}: its tests cannot run: the module {module.__name__} is {source or 'built in'}; rename the file")
        for name, function in vars(module).items():
            if not name.startswith("_") and inspect.isfunction(function) and list(inspect.signature(function).parameters) == [parameter]:
                tests.append((module.__name__, function))
    return tests


def out_of_time(number, frame):
    raise TimeoutError(f"the test took more than {TEST_TIMEOUT_S} s")


@dataclasses.dataclass
class Outcome:
    """How a test went."""

    result: str  # "passed", "failed" or "skipped"
    seconds: float
    details: str = ""  # what a person should read about it
    reason: str = ""  # why it failed, in short


def run_test(test, make, kind):
    """Run one test, and once more if the emulator failed; returns its Outcome."""
    started = time.monotonic()
    try:
        return attempt(test, make, kind)
    except EmulatorError as error:
        first = f"once more after {time.monotonic() - started:.0f} s, in which the emulator failed: {error}\n"
    try:
        again = attempt(test, make, kind)
    except EmulatorError as error:
        again = Outcome("failed", time.monotonic() - started, str(error), f"the emulator failed again: {error}")
    return dataclasses.replace(again, details=first + again.details)


def attempt(test, make, kind):
    """Run one test; returns its Outcome. Raises EmulatorError when it says nothing."""
    started = time.monotonic()
    subject = make(test.__name__, kind)
    shutil.rmtree(subject.directory, ignore_errors=True)
    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(TEST_TIMEOUT_S)
    # A signal does not reach Python code while a library waits: then the log says where.
    faulthandler.dump_traceback_later(TEST_TIMEOUT_S + STUCK_S)
    took = lambda: time.monotonic() - started
    try:
        note = test(subject)
        subject.check_end()
        return Outcome("passed", took(), note or "")
    except Skipped as reason:
        return Outcome("skipped", took(), str(reason))
    except EmulatorError:
        raise
    except (Exception, SystemExit) as error:  # whatever it is, the test failed, and the others still run
        details = traceback.format_exc(limit=-3) + subject.logs()
        return Outcome("failed", took(), details, f"{type(error).__name__}: {error}")
    finally:
        signal.alarm(0)
        subject.close()
        faulthandler.cancel_dump_traceback_later()


def shortened(text, lines=3, width=300):
    return "\n         ".join(line[:width] for line in text.splitlines()[:lines])


class Report:
    """Says how each test went, for a person or as JSON lines."""

    def __init__(self, as_json):
        self.as_json, self.counts = as_json, {"passed": 0, "failed": 0, "skipped": 0}
        self.failures = []

    def test(self, file, name, outcome):
        result, seconds, details = outcome.result, outcome.seconds, outcome.details
        self.counts[result] += 1
        if result == "failed":
            self.failures.append(f"{file}: {name}: {shortened(outcome.reason)}")
        if self.as_json:
            print(json.dumps({"event": "test", "file": file, "name": name, "result": result,
                              "seconds": round(seconds, 1), "details": details}), flush=True)
            return
        print(f"{'ok' if result == 'passed' else result:8} {file}: {name} ({seconds:.1f} s)", flush=True)
        if details:
            print("    " + details.replace("\n", "\n    ").rstrip(), flush=True)

    def end(self):
        if self.as_json:
            print(json.dumps({"event": "end", **self.counts}))
            return
        # Once more, since the end of a long log is what is looked at.
        for failure in self.failures:
            print(f"failed   {failure}")
        skipped = f", {self.counts['skipped']} skipped" if self.counts["skipped"] else ""
        print(f"{self.counts['passed']} passed, {self.counts['failed']} failed{skipped}")


def run_tests(tests, make, kind, options):
    """Run the tests in --jobs processes, and report them in their order."""
    report = Report(options.json)
    with multiprocessing.Pool(options.jobs, initializer=die_with_parent) as pool:
        runs = [(file, test.__name__, pool.apply_async(run_test, (test, make, kind))) for file, test in tests]
        pool.close()
        for file, name, run in runs:
            report.test(file, name, run.get())
        # Ends the workers before the `with` does, whose signal one that begins to wait at that moment would never see.
        pool.join()
    report.end()
    return report


def parse_arguments(description, kinds_option=None, kinds=(None,)):
    """The command line of a suite; kinds_option chooses what `make` of main() gets, the first of kinds by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="run the tests whose file or name contains one of these")
    parser.add_argument("--list", action="store_true", help="print the tests' names and stop")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--nightly", action="store_true", help="run also the tests that are left to `make nightly`")
    parser.set_defaults(kind=kinds[0])
    if kinds_option:
        parser.add_argument(kinds_option, dest="kind", choices=kinds)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="run N tests at a time")
    return parser.parse_args()


def main(options, tests, make, prepare):
    """Run the tests that the options select, each on a make(name, kind), after a prepare(). Ends the program."""
    if options.words:
        tests = [(file, test) for file, test in tests if any(word in f"{file}: {test.__name__}" for word in options.words)]
    elif not options.nightly:
        tests = [(file, test) for file, test in tests if not getattr(test, "is_nightly", False)]
    if options.list:
        for file, test in tests:
            print(f"{file}: {test.__name__}")
        return
    if not tests:
        sys.exit(f"no test matches: {' '.join(options.words)}")
    exit_on_sigterm()
    prepare()
    sys.exit(1 if run_tests(tests, make, options.kind, options).counts["failed"] else 0)

#!/usr/bin/env python3
"""Counts cache lines that move between cores when 1 to 16 cores write 4 KiB to one RAID 5.

Each core has a thread, and one after the other takes a turn (`hot-path --trace`); valgrind's tool lackey lists each load
and store. Caches are modelled as unlimited: a line moves when a core writes to it and another core has it, or when a core
reads it after another core wrote to it."""

import argparse
import os
import subprocess

LINE = 64
COUNTS = (1, 2, 4, 8, 16)
BEGIN, END, BETWEEN_TURNS = 64, 65, 66  # marks behind those of the cores, as hot_path.rs numbers them


def moved_lines(trace, start, length, mark_bytes):
    """Lines that move because a core writes to them, and because it reads them, between the marks of the beginning and
    the end. `trace` has the loads and stores that lackey lists. The marks, and what else the bench shares, take `length`
    bytes from `start` on."""
    by_address = {f" S {start + number * mark_bytes:08x},8\n".encode(): number for number in range(BETWEEN_TURNS + 1)}
    for entry in trace:  # until the turn that makes the array, which is not counted either
        if entry in by_address:
            break
    holders, writers = {}, {}  # of a line: bits of the cores that have it, the core that wrote to it last
    core, is_counted, written, read = BETWEEN_TURNS, False, 0, 0
    for entry in trace:
        if entry in by_address:
            number = by_address[entry]
            if number == END:
                return written, read
            if number == BEGIN:
                is_counted = True
            else:
                core = number
            continue
        if core == BETWEEN_TURNS:
            continue
        address, _, size = entry[3:].partition(b",")
        first, mine = int(address, 16), 1 << core
        if start <= first < start + length:
            continue
        for line in range(first // LINE, (first + int(size) - 1) // LINE + 1):
            holding = holders.get(line, 0)
            if entry.startswith(b" L"):
                if not holding & mine:
                    holders[line] = holding | mine
                    read += is_counted and writers.get(line, core) != core
            else:
                if holding & ~mine:
                    written += is_counted
                holders[line], writers[line] = mine, core
    raise EOFError("the trace ends before its last mark")


def marks_of(program):
    """What `--trace` prints. Valgrind loads a program at the same address each time."""
    command = ["valgrind", "--tool=none", "--log-file=/dev/null", program, "--trace", "bitmap", "1"]
    return [int(word) for word in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()]


def count(program, mode, cores, start, length, mark_bytes, requests):
    """Lines that writes and reads move, for each request."""
    reader, writer = os.pipe()
    command = ["valgrind", "--tool=lackey", "--trace-mem=yes", f"--log-fd={writer}", program, "--trace", mode, str(cores)]
    with (subprocess.Popen(command, stdout=subprocess.DEVNULL, pass_fds=[writer]) as valgrind,
          subprocess.Popen(["grep", "--text", "^ "], stdin=reader, stdout=subprocess.PIPE) as accesses):
        os.close(reader)
        os.close(writer)
        try:
            return [lines / requests for lines in moved_lines(accesses.stdout, start, length, mark_bytes)]
        finally:
            valgrind.kill()
            accesses.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", default="target/release/hot-path", help="[target/release/hot-path]")
    parser.add_argument("--cores", type=int, nargs="*", default=COUNTS, help="numbers of cores [1 2 4 8 16]")
    args = parser.parse_args()
    marks = marks_of(args.program)
    print("| consistency | cores | lines moved by writes | lines moved by reads |\n| --- | --- | --- | --- |")
    for mode in ("ppl", "bitmap"):
        for cores in args.cores:
            written, read = count(args.program, mode, cores, *marks)
            print(f"| {mode} | {cores} | {written:.2f} | {read:.2f} |", flush=True)


if __name__ == "__main__":
    main()

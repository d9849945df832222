"""Parity beside ISA-L, a plain loop and what the machine can read: runs the program `parity`, writes its table."""

import json
import statistics
import subprocess
from plot import bars

OURS, ISAL, PLAIN, READ = "freestone", "ISA-L", "plain loop", "read"
MS = 15

NOTE = (
    "Gigabytes of data a second of one core's time, the median of the rounds (lowest..highest); ratios are taken round by round.\n"
    "Each case encodes, or recovers as many data strips as there are parities.\n"
    "Strips of 4K and 64K stay in the caches as far as they fit; strips of 1M come from memory.\n"
    "\"read\" is the rate at which the core reads memory, the better of one stream and four, without writing.\n"
    "Parity over cold data must also write, so \"moved / read\" counts the parity too.\n"
    "The plain loop sums four sources at a time and is compiled for AVX2.")


def measure(repo, core, rounds):
    binary = repo / "target" / "release" / "parity"
    argv = ["taskset", "-c", str(core), str(binary), "--json", "--rounds", str(max(rounds, 7)), "--ms", str(MS)]
    return json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout)


def spread(values, digits=1):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


def report(results, run, folder):
    cold = [((case["shape"], "1M cold"), case["gb_s"]) for case in results["cases"] if "cold" in case["size"]]
    (folder / "parity.svg").write_text(bars("Parity of cold data: GB of data a second of a core, median and spread", cold, legend=120))
    speeds, peers = (OURS, ISAL, PLAIN, READ), (ISAL, PLAIN, READ)
    head = ["shape", "strips", *speeds, *(f"ours / {peer}" for peer in peers), "moved / read"]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for case in results["cases"]:
        found = case["gb_s"]
        ratio = lambda peer: [ours / theirs for ours, theirs in zip(found[OURS], found[peer])]
        row = [case["shape"], case["size"], *(spread(found[name]) if name in found else "" for name in speeds),
               *(spread(ratio(peer), 2) if peer in found else "" for peer in peers)]
        data, parity = map(int, case["shape"].split()[0].split("+"))
        row.append(spread([(data + parity) / data * value for value in ratio(READ)], 2) if READ in found else "")
        rows.append("| " + " | ".join(row) + " |")
    rounds = len(results["cases"][0]["gb_s"][OURS])
    return ["## Parity", f"{run}, {rounds} rounds of {MS} ms; instructions: {results['instructions']}.", NOTE,
            "\n".join(rows), "![Parity of cold data](parity.svg)"]

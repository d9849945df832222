"""Arrays: what the engine costs, how much of modelled drives it gets, how it rebuilds. Runs the program `raid-engine`
and writes its tables and plot."""

import json
import statistics
import subprocess
from plot import bars

SECONDS = 1

ENGINE_NOTE = (
    "RAID 5 of 4+1 with strips of 64 KiB on members that cost nothing (metadata is kept, data and log are not), load "
    "generator on the same cores: 32 requests of 4 KiB in flight on each core, or 8 writes of a whole stripe (256 KiB of data, always the "
    "same memory, so hot). \"two / one\" is two cores on one array against one, round by round.")
DRIVES_NOTE = (
    "24 modelled drives, each with a ceiling of 10,000 requests and 200 MiB a second (whichever asks for more time) and 50 µs of latency. "
    "Measured on one core, which also is the load generator, and in virtual time, where computing takes none: what the array asks of its "
    "drives. Where the two differ the core is the limit: sequential writes come from 48 MiB of memory, which is in no cache, are copied, and "
    "the copies are summed. Theory for random writes of 4 KiB: 2 reads and 2 writes "
    "(`bitmap`), and an entry in the log (`ppl`); for sequential writes every drive's bandwidth less the share of parity. "
    "Random: 4 KiB, 2048 in flight; sequential: 1 MiB, 48 in flight, default strips (32 KiB and 64 KiB: a stripe is 736 or 704 KiB, so requests "
    "do not fit stripes); regions of 64 MiB, as on drives of some terabytes.")
REBUILD_NOTE = (
    "4+1 on members in memory, full, one core: bytes of surviving strips that a rebuild reads in a second, beside what XOR of cold "
    "memory does on the same core just before (the members are RAM disks: each strip is copied out, summed and copied in).")
FOREGROUND_NOTE = (
    "p99 of 4 KiB requests (8 in flight) on a 4+1 of modelled NVMe drives (200,000 requests and 3 GiB a second, 80 µs) that lacks a member: before a "
    "rebuild and during it, the rebuild being held to 1.5 times the former (`latency_target`).")


def measure(repo, rounds):
    argv = [str(repo / "target" / "release" / "raid-engine"), "--seconds", str(SECONDS)]
    results = run([*argv, "--rounds", str(rounds)])
    in_virtual_time = {case["name"]: case["rounds"][0] for case in run([*argv, "--rounds", "1", "--virtual-time"])}
    for case in of(results, "drives"):
        case["virtual"] = in_virtual_time[case["name"]]
    return results


def run(argv):
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def spread(values, digits=1):
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f}..{max(values):,.{digits}f})"


def table(head, rows):
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def ratios(ours, theirs):
    return [a / b for a, b in zip(ours, theirs)]


def of(results, name):
    return [case for case in results if case["table"] == name]


def engine_table(cases):
    rows = []
    for one in (case for case in cases if case["cores"] == 1):
        two = next(case for case in cases if case["cores"] == 2 and (case["mode"], case["load"]) == (one["mode"], one["load"]))
        is_wide = one["len"] > 4096
        unit, scale = ("GB/s", one["len"] / 1e9) if is_wide else ("k IOPS", 1e-3)
        scaled = [spread([rate * scale for rate in case["rounds"]]) for case in (one, two)]
        rows.append([one["load"], one["mode"], unit, *scaled, spread(ratios(two["rounds"], one["rounds"]), 2)])
    return table(["load", "consistency", "unit", "one core", "two cores", "two / one"], rows)


def efficiency(case):
    return [100 * rate / case["theory"] for rate in case["rounds"]]


def drives_table(cases):
    rows = []
    for case in cases:
        unit, scale = ("MiB/s", case["len"] / 2**20) if case["len"] > 4096 else ("IOPS", 1)
        rows.append([case["array"], case["load"], case["mode"], f"{case['theory'] * scale:,.0f} {unit}",
                     spread([rate * scale for rate in case["rounds"]], 0), spread(efficiency(case)) + " %",
                     f"{100 * case['virtual'] / case['theory']:.1f} %"])
    return table(["array", "load", "consistency", "theory", "measured", "efficiency", "in virtual time"], rows)


def drives_plot(cases):
    """A group for each array and load, a bar for each mode."""
    groups = {}
    for case in cases:
        groups.setdefault((case["load"], *case["array"].split(", ")), {})[case["mode"]] = efficiency(case)
    title = "Modelled drives: percent of what 24 of them can do, median and spread"
    return bars(title, list(groups.items()), legend=90, gap=50, most=100)


def rebuild_tables(cases):
    speed, *foregrounds = cases
    rebuild, xor = ([found[key] for found in speed["rounds"]] for key in ("rebuild", "xor"))
    rows = [[spread(rebuild), spread(xor), spread([100 * ratio for ratio in ratios(rebuild, xor)]) + " %"]]
    parts = [REBUILD_NOTE, table(["rebuild, GB/s", "cold XOR, GB/s", "rebuild / XOR"], rows), FOREGROUND_NOTE]
    rows = []
    for case in foregrounds:
        without, during, rebuilt = ([found[key] for found in case["rounds"]] for key in ("without", "during", "rebuild"))
        rows.append([case["name"].removeprefix("rebuild: foreground "), spread([ns / 1e3 for ns in without]),
                     spread([ns / 1e3 for ns in during]), spread(ratios(during, without), 2), spread([b / 1e6 for b in rebuilt], 0)])
    head = ["load", "p99 without, µs", "p99 during, µs", "during / without", "rebuild meanwhile, MB/s of a member"]
    return [*parts, table(head, rows)]


def report(results, run, folder):
    (folder / "raid_drives.svg").write_text(drives_plot(of(results, "drives")))
    rounds = len(results[0]["rounds"])
    when = f"{run.split(',')[0]}, {rounds} rounds of {SECONDS} s a case; median (lowest..highest)."
    return ["## Arrays: what the engine costs", when, ENGINE_NOTE, engine_table(of(results, "engine")),
            "## Arrays on modelled drives", when, DRIVES_NOTE, drives_table(of(results, "drives")),
            "![Efficiency on modelled drives](raid_drives.svg)",
            "## Rebuild", when, *rebuild_tables(of(results, "rebuild"))]

"""Arrays: what the engine costs, how much of modelled drives it gets, how it rebuilds. Runs the program `raid-engine`
and writes its tables and plot."""

import json
import statistics
import subprocess
from plot import bars

SECONDS = 1

ENGINE_NOTE = (
    "RAID 5 of 4+1 with strips of 64 KiB and a mirror, on members without cost: they keep metadata, but no data and no log.\n"
    "The load generator runs on the same cores.\n"
    "Each core has 32 requests of 4 KiB in flight, or 8 writes of a whole stripe (256 KiB) or 128 KiB, from the same, hot memory.\n"
    "Stable memory, which network exports have, is written in place; memory that a guest can change is copied first.\n"
    "Rates count the cores' own time, which excludes other programs; \"ns\" is that time for a request, of one core and of two.\n"
    "\"two / one\" compares two cores on one array with one core, round by round.")
DRIVES_NOTE = (
    "24 modelled drives have 50 µs of latency and a limit of 10,000 requests and 200 MiB a second, whichever takes longer.\n"
    "One measurement is on one core, which is also the load generator.\n"
    "The other is in virtual time, where computing takes no time: it shows the requests of the array to its drives.\n"
    "Where the two differ, the core is the limit.\n"
    "Sequential writes come from 48 MiB of memory, which fits no cache; they are copied, and the copies are summed.\n"
    "In theory a random write of 4 KiB takes 2 reads and 2 writes (`bitmap`), and an entry in the log (`ppl`).\n"
    "Sequential writes get every drive's bandwidth less the share of parity.\n"
    "Random requests have 4 KiB, 2048 in flight; sequential ones 1 MiB, 48 in flight.\n"
    "Strips are the default (32 KiB and 64 KiB): a stripe is 736 or 704 KiB, so requests do not fit stripes.\n"
    "Regions have 64 MiB, as on drives of some terabytes.")
REBUILD_NOTE = (
    "A full array of 4+1 on RAM disks (`mem` with `huge-pages=on`), on one core.\n"
    "\"rebuild\" counts bytes of surviving strips that a rebuild reads in a second: each strip is copied out, summed and copied in.\n"
    "\"cold XOR\" is the rate of XOR on cold memory, on the same core just before.")
FOREGROUND_NOTE = (
    "p99 of 4 KiB requests, 8 in flight, on RAID 6 of 4+2 modelled NVMe drives (200,000 requests and 3 GiB a second, 80 µs) without one member.\n"
    "It is measured before and during a rebuild, which is limited to 1.5 times the latency before (`latency_target`).")


def measure(repo, rounds):
    argv = [str(repo / "target" / "release" / "raid-engine"), "--seconds", str(SECONDS)]
    results = run([*argv, "--rounds", str(rounds), "--cpu-time", "--only", "engine:"])
    for name in ("drives:", "rebuild:"):
        results += run([*argv, "--rounds", str(rounds), "--only", name])
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
        key = ("array", "mode", "load")
        two = next(case for case in cases if case["cores"] == 2 and all(case[name] == one[name] for name in key))
        is_wide = one["len"] > 4096
        unit, scale = ("GB/s", one["len"] / 1e9) if is_wide else ("k IOPS", 1e-3)
        scaled = [spread([rate * scale for rate in case["rounds"]]) for case in (one, two)]
        times = [1e9 * case["cores"] / statistics.median(case["rounds"]) for case in (one, two)]
        rows.append([one["array"], one["load"], one["mode"], unit, *scaled, spread(ratios(two["rounds"], one["rounds"]), 2),
                     " / ".join(f"{ns:,.0f}" for ns in times)])
    return table(["array", "load", "consistency", "unit", "one core", "two cores", "two / one", "ns"], rows)


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
    when = f"{run}, {rounds} rounds of {SECONDS} s a case; median (lowest..highest)."
    return ["## Arrays: what the engine costs", when, ENGINE_NOTE, engine_table(of(results, "engine")),
            "## Arrays on modelled drives", when, DRIVES_NOTE, drives_table(of(results, "drives")),
            "![Efficiency on modelled drives](raid_drives.svg)",
            "## Rebuild", when, *rebuild_tables(of(results, "rebuild"))]

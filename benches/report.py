"""Turns the results of benches/run into a table (Markdown) and plots (SVG)."""

import statistics
import parity
import raid
from xml.sax.saxutils import escape

OURS = "freestone"
COLOURS = ["#0b7285", "#adb5bd", "#868e96", "#e8590c"]
LEGEND = 215  # room for a server's name

SECTIONS = [
    ("null", "Null device over vhost-user-blk"),
    ("file", "File on tmpfs over vhost-user-blk",
     "tmpfs makes io_uring hand each transfer to a worker thread. Freestone's io_uring driver knows that and copies transfers of "
     "up to 128 KiB at once; fio and qemu-storage-daemon go through the workers, and here everybody's workers share "
     "two cores with a polling initiator (fio has none)."),
]


LIBRARY_NOTE = (
    "One thread, one queue, blocking mode (`blkioq_do_io` with at least one completion), random reads through the page "
    "cache; ours by its C functions, the crate by its Rust functions (libblkio's C functions are a shell around them). As "
    "above, tmpfs makes io_uring hand transfers to worker threads, and Freestone's driver copies short ones at once.")


def case_name(case):
    return f"{case['rw']} {case['bs']} QD {case['qd']}"


def median_with_spread(values):
    return f"{statistics.median(values) / 1e3:,.1f}k ({min(values) / 1e3:,.1f}..{max(values) / 1e3:,.1f})"


def ratio(ours, theirs):
    """The median of the ratios round by round, with their spread."""
    ratios = [a / b for a, b in zip(ours, theirs)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"


def best_qemu(by_server):
    names = [name for name in by_server if name.startswith("qemu")]
    return max(names, key=lambda name: statistics.median(by_server[name]))


def peers(servers):
    """What ours is compared with: heading -> which server of a case."""
    found = {}
    if any(name.startswith("qemu") for name in servers):
        found["best qemu-storage-daemon"] = best_qemu
    for word in ("crate blkio", "fio"):
        for name in servers:
            if name.startswith(word):
                found[word] = lambda _, name=name: name
    return found


def table(cases):
    servers = list(cases[0]["iops"])
    compared = peers(servers)
    head = ["case", *servers, *(f"ours / {peer}" for peer in compared)]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for case in cases:
        by_server = case["iops"]
        row = [case_name(case), *(median_with_spread(by_server[name]) for name in servers),
               *(ratio(by_server[OURS], by_server[choose(by_server)]) for choose in compared.values())]
        rows.append("| " + " | ".join(row) + " |")
    return "\n".join(rows)


def instruction_table(rows):
    libraries = [name for name in rows[0] if name != "qd"]
    lines = ["| instructions an I/O | " + " | ".join(libraries) + " |", "|" + "---|" * (len(libraries) + 1)]
    lines += [f"| randread 4096 QD {row['qd']} | " + " | ".join(f"{row[name]:.0f}" for name in libraries) + " |"
              for row in rows]
    return "\n".join(lines)


def library_parts(library, run, folder):
    parts = ["## C library, file on tmpfs", run, LIBRARY_NOTE]
    for name, title in (("file", "C library, driver io_uring, file on tmpfs"),
                        ("vhost_user", "C library, driver virtio-blk-vhost-user, null device")):
        (folder / f"library_{name}.svg").write_text(plot(library[name], title))
        if name == "vhost_user":
            parts.append("## C library over vhost-user, null device of `freestone serve`")
        parts += [table(library[name]), f"![{title}](library_{name}.svg)"]
        if name == "file" and library["instructions"]:
            parts += ["Instructions in the program's own code, counted by callgrind in the same mode, kernel and device not "
                      "included:", instruction_table(library["instructions"])]
    return parts


def round_up(value):
    """The next number that four steps of an axis divide well."""
    unit = 10 ** (len(str(int(value))) - 1)
    return next(step * unit for step in (1, 2, 4, 6, 8, 10, 12) if step * unit >= value)


def plot(cases, title):
    """Grouped bars, thousand IOPS, with the spread of the rounds as a line on each."""
    servers = list(cases[0]["iops"])
    bar, gap, left, top, height = 26, 24, 70, 60, 260
    group = bar * len(servers) + gap
    width = left + max(group * len(cases), LEGEND * len(servers)) + 20
    most = round_up(max(max(v) for case in cases for v in case["iops"].values()))
    y = lambda iops: top + height - height * iops / most
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top + height + 60}" '
           f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>',
           f'<text x="{left}" y="18" font-size="14">{escape(title)}: thousand IOPS, median and spread</text>']
    for i, name in enumerate(servers):
        out.append(f'<rect x="{left + i * LEGEND}" y="28" width="10" height="10" fill="{COLOURS[i]}"/>'
                   f'<text x="{left + 14 + i * LEGEND}" y="37">{escape(name)}</text>')
    for step in range(5):
        value = most * step / 4
        out.append(f'<line x1="{left}" x2="{width - 10}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#dee2e6"/>'
                   f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value / 1e3:,.0f}</text>')
    for c, case in enumerate(cases):
        x0 = left + gap / 2 + c * group
        for i, name in enumerate(servers):
            values = case["iops"][name]
            x, median = x0 + i * bar, statistics.median(values)
            out.append(f'<rect x="{x}" y="{y(median):.1f}" width="{bar - 4}" height="{top + height - y(median):.1f}" '
                       f'fill="{COLOURS[i]}"/><line x1="{x + 11}" x2="{x + 11}" y1="{y(min(values)):.1f}" '
                       f'y2="{y(max(values)):.1f}" stroke="black"/>')
        out.append(f'<text x="{x0 + (group - gap) / 2}" y="{top + height + 18}" text-anchor="middle">'
                   f'{escape(case["rw"])}</text><text x="{x0 + (group - gap) / 2}" y="{top + height + 32}" '
                   f'text-anchor="middle">{escape(str(case["bs"]))} QD {case["qd"]}</text>')
    return "\n".join(out) + "</svg>\n"


def when(results, part):
    run = results["runs"][part]
    trips = " and ".join(f"{ns:.0f}" for ns in run["round_trip_ns"])
    return f"{run['date']}, {run['rounds']} rounds of {run['seconds']:g} s a case; round trip {trips} ns before and after."


def write(results, folder):
    parts = ["# Speed beside the peers",
             "`make bench` writes this page. Server on core 0, initiator (`freestone bench`, the same for every server) on "
             "core 1; thousand IOPS, median of the rounds (lowest..highest); ratios are taken round by round.",
             f"{results['machine']}; {results['peer']}. On a virtual machine the cores move: a cache-line round trip "
             "between the two, given for each part, moves with them, and polled paths with it."]
    for name, title, *notes in SECTIONS:
        if name in results:
            (folder / f"{name}.svg").write_text(plot(results[name], title))
            parts += [f"## {title}", when(results, name), *notes, table(results[name]), f"![{title}]({name}.svg)"]
    if "idle" in results:
        idle = results["idle"]
        parts += ["## Idle", when(results, "idle"), f"{idle['exports']} exports of 4 queues with a connected client each and no I/O: "
                  f"{idle['cpu_percent']:.2f} % of one core; {idle['private_kb']} KiB of private memory in all, the program "
                  f"included: {idle['private_kb'] / idle['exports']:.0f} KiB an export."]
    if "library" in results:
        parts += library_parts(results["library"], when(results, "library"), folder)
    if "parity" in results:
        parts += parity.report(results["parity"], when(results, "parity"))
    if "raid" in results:
        parts += raid.report(results["raid"], when(results, "raid"), folder)
    (folder / "README.md").write_text("\n\n".join(parts) + "\n")

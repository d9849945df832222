"""Turns the results of benches/run into a table (Markdown) and plots (SVG)."""

import statistics
import images
import parity
import raid
import spdk
from plot import bars

OURS = "freestone"

SECTIONS = [
    ("null", "Null device over vhost-user-blk"),
    ("file", "File on tmpfs over vhost-user-blk",
     "On tmpfs, io_uring passes each transfer to a worker thread.\n"
     "Freestone's io_uring driver detects that and copies transfers of up to 128 KiB itself.\n"
     "Both fio and qemu-storage-daemon use the workers.\n"
     "With qemu-storage-daemon, these share two cores with a polling initiator."),
]


LIBRARY_NOTE = (
    "One thread, one queue, blocking mode (`blkioq_do_io` with at least one completion), random reads through the page cache.\n"
    "Freestone is measured by its C functions, the crate by its Rust functions, around which libblkio's C functions are a shell.\n"
    "On tmpfs, io_uring passes transfers to worker threads, and Freestone's driver copies short ones itself.")


NBD_NOTE = (
    "A disk of 1 GiB in memory, written once, over one connection on a Unix socket.\n"
    "The disk of qemu-storage-daemon is a file on tmpfs, since it has no disk in memory.\n"
    "Transfers of 128 KiB are two copies in each server (disk to buffer, buffer to socket) and one in the client.")
NVME_TCP_NOTE = (
    "Freestone's initiator on its own target over the loopback interface: one I/O queue, a disk of 1 GiB in memory, written once.\n"
    "The section \"In a guest\" has the kernel's target, and [spdk.md](spdk.md) the recipe for SPDK's.")
GUEST_NOTE = (
    "Instructions of a request from fio to the disk and back, in fio, the kernel and the server together; fewer is better.\n"
    "The guest has one emulated processor, whose clock counts instructions (QEMU's `icount`).\n"
    "The method shows nothing about caches, wake-ups of other cores, or work in parallel on several cores.\n"
    "Freestone's server does not poll here (`--poll-us never`), since polling needs a processor of its own.\n"
    "Batches depend on the order in which threads run, so a ratio varies by some percent.")
ARRAYS_NOTE = (
    "Each array has 4+1 RAM disks of the kernel, past the page cache, and strips of 64 KiB; 256 KiB are a whole stripe.\n"
    "Linux's md answers a request in the kernel.\n"
    "Freestone answers it in its server, so its figures include ublk; the table of ublk on one RAM disk shows that part.\n"
    "The figures show the work of one processor for a request, not the speed of arrays of drives.\n"
    "A RAM disk answers at once, and has no cache to flush.\n"
    "Both arrays log partial parity before a stripe changes; without `ppl` or a journal md has the write hole.")
GUEST_TABLES = {
    "nvme_tcp": ("NVMe/TCP: the kernel's initiator on Freestone's target and on the kernel's",
                 "Each target has a RAM disk of the kernel of its own, past the page cache; no digests."),
    "ublk_null": ("ublk: a disk that does nothing", "One queue of 128."),
    "ublk_disk": ("ublk and loop: a RAM disk", "One queue of 128; a RAM disk of the kernel for each, past the page cache (`loop` with `--direct-io=on`)."),
    "ublk_zero_copy": ("ublk without a copy, and loop: a RAM disk", "On Linux 7.3, one queue of 128; a RAM disk of the kernel for each, past the page cache (`loop` with `--direct-io=on`)."),
    "raid5_ppl": ("RAID 5 with ppl: Freestone over ublk, and md", ARRAYS_NOTE),
    "raid5_bitmap": ("RAID 5 with bitmap: Freestone over ublk, and md",
                     "As above, with a write-intent bitmap instead of the log; its regions have 64 KiB in both.\n"
                     "The modes promise the same: a resync of the regions with writes in flight, and no loss while all members are present.\n"
                     "Neither closes the write hole."),
    "raid1_bitmap": ("RAID 1 with bitmap: Freestone over ublk, and md", "As above, with two copies; a mirror has no write hole."),
}


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
    qemus = [name for name in servers if name.startswith("qemu")]
    if len(qemus) > 1:
        found["best qemu-storage-daemon"] = best_qemu
    for name in servers:
        if not name.startswith(OURS) and (len(qemus) < 2 or name not in qemus):
            found[name.split(",")[0]] = lambda _, name=name: name
    return found


def table(cases):
    """What each server did, and ours by each peer."""
    return _table(cases, lambda peer: f"ours / {peer}", lambda ours, theirs: ratio(ours, theirs))


def guest_table(cases):
    """What each server took, and each peer by ours: more than one is better for us here, too."""
    return _table(cases, lambda peer: f"{peer} / ours", lambda ours, theirs: ratio(theirs, ours))


def _table(cases, heading, compare):
    servers = list(cases[0]["iops"])
    compared = peers(servers)
    rows = []
    for case in cases:
        by_server = case["iops"]
        rows.append([case_name(case), *(median_with_spread(by_server[name]) for name in servers),
                     *(compare(by_server[OURS], by_server[choose(by_server)]) for choose in compared.values())])
    return raid.table(["case", *servers, *map(heading, compared)], rows)


def instruction_table(rows):
    libraries = [name for name in rows[0] if name != "qd"]
    lines = ["| instructions an I/O | " + " | ".join(libraries) + " |", "|" + "---|" * (len(libraries) + 1)]
    lines += [f"| randread 4096 QD {row['qd']} | " + " | ".join(f"{row[name]:.0f}" for name in libraries) + " |"
              for row in rows]
    return "\n".join(lines)


def nbd_parts(results, run, folder):
    clients = {"bench": "the client is `freestone bench`", "fio": "the client is fio's engine `nbd` (libnbd)"}
    (folder / "nbd.svg").write_text(plot(results["bench"], "NBD over a Unix socket"))
    parts = ["## NBD over a Unix socket", run, NBD_NOTE]
    for client, words in clients.items():
        parts += [f"Here {words}:", table(results[client])]
    return [*parts, "![NBD over a Unix socket](nbd.svg)"]


def guest_parts(results, run, folder):
    parts = ["## In a guest", run, GUEST_NOTE]
    for name, (title, note) in GUEST_TABLES.items():
        if name not in results:  # an earlier run had no such table
            continue
        (folder / f"guest_{name}.svg").write_text(bars(f"{title}: thousand instructions a request", _groups(results[name])))
        parts += [f"### {title}", note, guest_table(results[name]), f"![{title}](guest_{name}.svg)"]
    return parts


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


def plot(cases, title):
    return bars(f"{title}: thousand IOPS, median and spread", _groups(cases))


def _groups(cases):
    """The bars of a plot, in thousands."""
    return [((case["rw"], f"{case['bs']} QD {case['qd']}"),
             {name: [value / 1e3 for value in values] for name, values in case["iops"].items()}) for case in cases]


def date(results, part):
    """The date of a part's run, after the machine if it was another than the page's."""
    run = results["runs"][part]
    other = run.get("machine", results["machine"])
    machine = "" if other == results["machine"] else f"On {other}: "
    return f"{machine}{run['date']}"


def when(results, part):
    run = results["runs"][part]
    trips = " and ".join(f"{ns:.0f}" for ns in run["round_trip_ns"])
    return f"{date(results, part)}, {run['rounds']} rounds of {run['seconds']:g} s a case; round trip {trips} ns before and after."


def write(results, folder):
    parts = ["# Speed compared with other software",
             "`make bench` writes this page.\n"
             "The server runs on core 0; the initiator (`freestone bench`, the same for every server) on core 1.\n"
             "Figures are thousand IOPS, the median of the rounds (lowest..highest); ratios are taken round by round.",
             f"{results['machine']}; {results['peer']}.\n"
             "On a virtual machine the cores move, and polled paths vary with their distance.\n"
             "Each part names the time of a cache-line round trip between the two cores."]
    for name, title, *notes in SECTIONS:
        if name in results:
            (folder / f"{name}.svg").write_text(plot(results[name], title))
            parts += [f"## {title}", when(results, name), *notes, table(results[name]), f"![{title}]({name}.svg)"]
    if "idle" in results:
        idle = results["idle"]
        parts += ["## Idle", when(results, "idle"), f"{idle['exports']} exports of 4 queues with a connected client each and no I/O use "
                  f"{idle['cpu_percent']:.2f} % of one core.\n"
                  f"They use {idle['private_kb']} KiB of private memory including the program, which is "
                  f"{idle['private_kb'] / idle['exports']:.0f} KiB an export."]
    if "nbd" in results:
        parts += nbd_parts(results["nbd"], when(results, "nbd"), folder)
    if "nvme_tcp" in results:
        parts += ["## NVMe/TCP on one host", when(results, "nvme_tcp"), NVME_TCP_NOTE, table(results["nvme_tcp"])]
    if "spdk" in results:
        parts += spdk.report(results["spdk"], when(results, "spdk"), table)
    if "images" in results:
        parts += images.report(results["images"], when(results, "images"), folder, table, plot)
    if "guest" in results:
        run = results["runs"]["guest"]
        parts += guest_parts(results["guest"], f"{run['date']}, {run['rounds']} rounds.", folder)
    if "library" in results:
        parts += library_parts(results["library"], when(results, "library"), folder)
    if "parity" in results:
        parts += parity.report(results["parity"], date(results, "parity"), folder)
    if "raid" in results:
        parts += raid.report(results["raid"], date(results, "raid"), folder)
    (folder / "README.md").write_text("\n\n".join(parts) + "\n")

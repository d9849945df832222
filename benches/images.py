"""Disk images in the format qcow2: in one process beside raw files and `qemu-img bench`, over NBD beside qemu-nbd."""

import os
import re
import subprocess
import tempfile

import paths
from servers import INITIATOR_CORE, RAMP_S, SERVER_CORE, Server, as_cases, fill, freestone, initiator, measure

GIB = 1 << 30
MAPPED_GIB, NEW_GIB, COMPRESSED_MIB = 1, 64, 128
OURS, RAW, QEMU = "freestone", "raw file", "qemu-img bench"
MAPPED = [("randread", "4K", 32), ("randwrite", "4K", 32)]
NEW = [("randwrite", "4K", 32)]
COMPRESSED = [("read", "4K", 8)]
# Two requests of a walk lie this far apart, so that each is in another cluster.
STRIDE = (1 << 20) + 4096
WORDS = "Clusters have 64 KiB, and files are on tmpfs."
TITLES = {
    "mapped": ("clusters that the image has",
               "Each cluster was written before.\n`qemu-img bench` walks through the disk in steps of 1 MiB and 4 KiB."),
    "new": ("new clusters", "Most writes are the first ones to their clusters, and no flush follows."),
    "subclusters": ("new clusters of 128 KiB with subclusters", "Most writes are the first ones to their clusters, and no flush follows."),
    "compressed": ("compressed clusters (zlib), read in order", "The words of the disk are random, of few letters."),
    "cores": ("two cores, clusters that the image has",
              "`freestone` and the raw file have both cores here, with a queue on each; the other column has one."),
    "new_cores": ("two cores, new clusters",
                  "As above.\nThe thread for metadata needs a core, too, so the clients wait for events."),
    "nbd": ("over NBD", "Clusters that the image has, one connection on a Unix socket, the client is `freestone bench`."),
}


def measure_images(rounds, seconds):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        images = {name: os.path.join(directory, name) for name in ("mapped", "raw", "new", "subclusters", "compressed")}
        fill(images["raw"], MAPPED_GIB * 1024)
        _qemu_img("convert", "-f", "raw", "-O", "qcow2", images["raw"], images["mapped"])
        words = os.path.join(directory, "words")
        _write_words(words)
        _qemu_img("convert", "-c", "-f", "raw", "-O", "qcow2", words, images["compressed"])
        qcow2 = {name: f"qcow2:file={path},restart-log={directory}" for name, path in images.items()}
        found = {name: {} for name in TITLES}

        def note(table, case, column, value):
            found[table].setdefault(case, {}).setdefault(column, []).append(value)

        for _ in range(rounds):
            for case in MAPPED:
                note("mapped", case, OURS, _own(qcow2["mapped"], case, seconds))
                note("mapped", case, RAW, _own(f"io_uring:path={images['raw']}", case, seconds))
                note("mapped", case, QEMU, _qemu_bench(images["mapped"], case, seconds, MAPPED_GIB * GIB))
                note("cores", case, "one core", _own(qcow2["mapped"], case, seconds))
                note("cores", case, OURS, _own(qcow2["mapped"], case, seconds, is_on_both=True))
                note("cores", case, RAW, _own(f"io_uring:path={images['raw']}", case, seconds, is_on_both=True))
            for case in NEW:
                for table, options in ("new", "cluster_size=64K"), ("subclusters", "extended_l2=on,cluster_size=128K"):
                    make = lambda table=table, options=options: _create(images[table], options)  # noqa: E731
                    make()
                    note(table, case, OURS, _own(qcow2[table], case, seconds))
                    make()
                    note(table, case, QEMU, _qemu_bench(images[table], case, seconds, NEW_GIB * GIB))
                    os.unlink(images[table])
                for is_on_both, column in (False, "one core"), (True, OURS):
                    _create(images["new"], "cluster_size=64K")
                    note("new_cores", case, column, _own(qcow2["new"], case, seconds, is_on_both, "--event"))
                    os.unlink(images["new"])
            for case in COMPRESSED:
                note("compressed", case, OURS, _own(qcow2["compressed"], case, seconds))
                note("compressed", case, QEMU, _qemu_bench(images["compressed"], case, seconds, COMPRESSED_MIB << 20, 4096))
        found = {name: as_cases(results) for name, results in found.items()}
        found["nbd"] = as_cases(measure({
            OURS: lambda n, s: freestone(n, qcow2["mapped"], f"nbd:socket={s}", s),
            "qemu-nbd": lambda n, s: Server(n, ["qemu-nbd", "--persistent", "--format=qcow2", "--cache=none", "--aio=io_uring",
                                                f"--socket={s}", images["mapped"]], s),
        }, MAPPED, rounds, lambda s, *case: initiator(f"nbd:path={s},connections=1", *case, seconds)))
        return found


def report(results, run, folder, table, plot):
    """`table` and `plot`: what makes them of cases."""
    parts = ["## Disk images", run, WORDS]
    for name, (title, note) in TITLES.items():
        (folder / f"images_{name}.svg").write_text(plot(results[name], f"qcow2, {title}"))
        parts += [f"### qcow2, {title}", note, table(results[name]), f"![qcow2, {title}](images_{name}.svg)"]
    return parts


def _own(device, case, seconds, is_on_both=False, *options):
    """IOPS of an image in the process of `freestone bench`."""
    if not is_on_both:
        return initiator(device, *case, seconds, *options)
    return initiator(device, *case, seconds, *options, cores=f"{SERVER_CORE},{INITIATOR_CORE}", queues=2)


def _qemu_bench(path, case, seconds, size, stride=STRIDE):
    """IOPS of `qemu-img bench` for about as long."""
    rw, block_size, depth = case
    assert block_size == "4K"
    options = ["-w"] if "write" in rw else []

    def rate(count):
        argv = ["taskset", "-c", str(INITIATOR_CORE), paths.QEMU_IMG, "bench", "-f", "qcow2", "-t", "none", "-i", "io_uring",
                "-c", str(count), "-d", str(depth), "-s", "4096", "-S", str(stride), *options, path]
        said = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=300).stdout
        return count / float(re.search(r"completed in ([\d.]+) seconds", said).group(1))

    # A walk that comes to the end of the disk begins anew: no cluster is written twice before.
    most = size // stride if "write" in rw and size > GIB else 10_000_000
    return rate(min(most, max(1000, int(rate(1000) * (seconds + RAMP_S)))))


def _create(path, options):
    _qemu_img("create", "-q", "-f", "qcow2", "-o", options, path, f"{NEW_GIB}G")


def _write_words(path):
    letters = bytes(b"etaoinsh"[byte & 7] for byte in os.urandom(1 << 20))
    with open(path, "wb") as file:
        for number in range(COMPRESSED_MIB):
            file.write(letters[number * 4099:] + letters[:number * 4099])


def _qemu_img(*arguments):
    subprocess.run([paths.QEMU_IMG, *arguments], check=True, stdout=subprocess.DEVNULL)

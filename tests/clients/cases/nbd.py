"""Stock NBD clients on `freestone serve --export nbd:…`: libnbd's tools, QEMU's, fio's nbd engine."""

import json
import os
import random
import shutil
import socket
import subprocess

import paths
from client import MIB, RUN_TIMEOUT_S, allocated_bytes, assert_bytes, sha256
from runner import Skipped

OVER_BOTH = (False, True)


def _run(client, program, *arguments, **options):
    return client.run(program, *arguments, uses_blkio=False, **options)


def nbdinfo_finds_what_the_export_says(client):
    for tcp in OVER_BOTH:
        server = client.serve_nbd("mem:size=64M", ",name=volume,description=a test,clients=4", tcp)
        uri = server.uri.replace("/disk", "/volume")
        info = json.loads(_run(client, "nbdinfo", "--json", uri))
        export, = info["exports"]
        assert info["protocol"] == "newstyle-fixed" and info["structured"], info
        assert export["export-name"] == "volume" and export["description"] == "a test", export
        assert export["export-size"] == 64 * MIB and not export["is_read_only"], export
        expected = {"block_size_minimum": 512, "block_size_preferred": 4096, "block_size_maximum": 32 * MIB} | {
            key: True for key in ("can_cache", "can_df", "can_fast_zero", "can_flush", "can_fua", "can_multi_conn",
                                  "can_trim", "can_zero")}
        assert {key: export.get(key) for key in expected} == expected, export
        assert export["contexts"] == ["base:allocation"], export
        listed = json.loads(_run(client, "nbdinfo", "--list", "--json", server.uri.replace("/disk", "/")))
        assert [entry["export-name"] for entry in listed["exports"]] == ["volume"], listed
        code, said = _run(client, "nbdinfo", server.uri.replace("/disk", "/other"), check=False)
        assert code != 0 and "no such export" in said, said
        server.stop()


def nbdinfo_maps_the_export_as_data(client):
    server = client.serve_nbd("mem:size=64M")
    extents = json.loads(_run(client, "nbdinfo", "--map", "--json", server.uri))
    assert sum(extent["length"] for extent in extents) == 64 * MIB, extents
    assert {(extent["type"], extent["description"]) for extent in extents} == {(0, "data")}, extents


def a_mostly_empty_image_is_mapped_and_copied_as_fast_as_its_data_is_small(client):
    """100 GiB with 4 MiB of data, served from the file, and once more from the first server."""
    image, back = client.path("sparse.img"), client.path("back.img")
    with open(image, "wb") as file:
        file.truncate(100 * 1024 * MIB)
        for at in (0, 50 * 1024 * MIB, 100 * 1024 * MIB - MIB):
            file.seek(at)
            file.write(random.Random(at).randbytes(MIB if at else 2 * MIB))
    first = client.serve_nbd(f"io_uring:path={image}")
    second = client.serve_nbd(f"nbd:uri={first.uri}")
    for server in (first, second):
        extents = json.loads(_run(client, "nbdinfo", "--map", "--json", server.uri))
        data = [(extent["offset"], extent["length"]) for extent in extents if extent["type"] == 0]
        expected = [(0, 2 * MIB), (50 * 1024 * MIB, MIB), (100 * 1024 * MIB - MIB, MIB)]
        assert data == expected and {extent["type"] for extent in extents} == {0, 3}, extents
        _run(client, "nbdcopy", server.uri, back)
        assert os.path.getsize(back) == 100 * 1024 * MIB and allocated_bytes(back) < 32 * MIB, allocated_bytes(back)
        with open(back, "rb") as copy, open(image, "rb") as source:
            for at, length in expected:
                copy.seek(at), source.seek(at)
                assert copy.read(length) == source.read(length), at
        os.remove(back)
    second.stop()
    first.stop()


def nbdcopy_copies_in_both_directions_over_several_connections(client):
    for tcp in OVER_BOTH:
        source, back = client.image_with_data(), client.path("back.img")
        server = client.serve_nbd("mem:size=64M", tcp=tcp)
        _run(client, "nbdcopy", "--flush", source, server.uri)
        _run(client, "nbdcopy", server.uri, back)
        assert sha256(source) == sha256(back)
        for more in ([], ["--synchronous"], ["--connections=1"], ["--request-size=33554432"]):
            os.remove(back)
            _run(client, "nbdcopy", *more, server.uri, back)
            assert sha256(source) == sha256(back), more
        server.stop()


def nbdcopy_keeps_every_byte_of_an_image_that_ends_inside_a_block(client):
    """The last block ends behind the file: its rest reads as zeroes, and a warning at the start says so."""
    size = 1_000_123
    content = random.Random(size).randbytes(size)
    for options in ("", ",direct=on", ",block-size=4096"):
        served = -(-size // 4096) * 4096 if "4096" in options else -(-size // 512) * 512
        source, back = client.path("odd.img"), client.path("back.img")
        with open(source, "wb") as file:
            file.write(content)
        server = client.serve_nbd(f"io_uring:path={source}{options}")
        assert f"{size}" in paths.tail(server.log) and f"{served}" in paths.tail(server.log), paths.tail(server.log)
        assert _run(client, "nbdinfo", "--size", server.uri).strip() == str(served)
        for more in ([], ["--synchronous"], ["--connections=1", "--requests=1"]):
            _run(client, "nbdcopy", *more, server.uri, back)
            with open(back, "rb") as file:
                assert file.read() == content + bytes(served - size), (options, more)
            os.remove(back)
        assert os.path.getsize(source) == size, "reading has changed the image"
        # The other way nbdcopy ends with a write of part of a block, which is refused: no success without the last bytes.
        code, said = _run(client, "nbdcopy", source, server.uri, check=False)
        assert code != 0 and "unaligned" in said, said
        server.stop()


def nbdcopy_writes_holes_to_a_file_as_holes(client):
    source, target = client.image_with_data(), client.image("target.img")
    server = client.serve_nbd(target)
    _run(client, "nbdcopy", "--flush", source, server.uri)
    server.stop()
    assert sha256(source) == sha256(target)
    assert allocated_bytes(target) < 32 * MIB, allocated_bytes(target)


def qemu_img_converts_and_compares(client):
    for tcp in OVER_BOTH:
        source, target, back = client.image_with_data(), client.image("target.img"), client.path("back.qcow2")
        server = client.serve_nbd(target, tcp=tcp)
        _run(client, "qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", "-W", source, server.uri)
        assert "identical" in _run(client, "qemu-img", "compare", "-f", "raw", "-F", "raw", source, server.uri)
        _run(client, "qemu-img", "convert", "-f", "raw", "-O", "qcow2", server.uri, back)
        assert "identical" in _run(client, "qemu-img", "compare", "-f", "raw", "-F", "qcow2", source, back)
        info = json.loads(_run(client, "qemu-img", "info", "--output=json", "-f", "raw", server.uri))
        assert info["virtual-size"] == 64 * MIB, info
        server.stop()
        assert sha256(source) == sha256(target)


def qemu_io_reads_writes_zeroes_and_discards(client):
    image = client.image()
    server = client.serve_nbd(image)
    said = _run(
        client, "qemu-io", "-f", "raw", server.uri, "-c", "write -P 0xa5 1M 4M", "-c", "write -f -P 0x5a 2M 64k",
        "-c", "write -z 3M 1M", "-c", "write -z -u 4M 512k", "-c", "discard 4608k 128k", "-c", "flush",
        "-c", "aio_write -P 0x77 8M 1M", "-c", "aio_read -P 0xa5 1M 1M", "-c", "aio_flush",
        "-c", "read -P 0xa5 1M 1M", "-c", "read -P 0x5a 2M 64k", "-c", "read -P 0 3M 1M", "-c", "read -P 0x77 8M 1M")
    assert "failed" not in said and "error" not in said.lower(), said
    server.stop()
    assert_bytes(image, [(MIB, MIB, 0xA5), (2 * MIB, 65536, 0x5A), (3 * MIB, MIB, 0), (8 * MIB, MIB, 0x77)])


def qemu_io_is_refused_what_a_read_only_export_does_not_allow(client):
    server = client.serve_nbd(client.image(), ",readonly")
    code, said = _run(client, "qemu-io", "-f", "raw", server.uri, "-c", "write 0 4k", check=False)
    assert code != 0 and "Permission denied" in said, said
    _run(client, "qemu-io", "-r", "-f", "raw", server.uri, "-c", "read -P 0 0 4k")


def clients_with_certificates_come_through_tls_and_strangers_do_not(client):
    ours, strangers = _certificates(client, "known"), _certificates(client, "unknown")
    for tcp in OVER_BOTH:
        source, back = client.image_with_data(), client.path("back.img")
        server = client.serve_nbd("mem:size=64M", f",tls-certificates={ours},tls-verify-peer=on", tcp)
        uri = _secured(server, tcp, f"tls-certificates={ours}")
        info = json.loads(_run(client, "nbdinfo", "--json", uri))
        assert info["TLS"] is True and info["exports"][0]["export-size"] == 64 * MIB, info
        _run(client, "nbdcopy", "--flush", source, uri)
        _run(client, "nbdcopy", uri, back)
        assert sha256(source) == sha256(back)
        said = _qemu_io(client, server, tcp, f"tls-creds-x509,dir={ours}", "read 0 4k", "write -P 0xa5 1M 4M", "read -P 0xa5 1M 4M")
        assert "failed" not in said, said
        code, said = _run(client, "nbdinfo", _secured(server, tcp, f"tls-certificates={strangers}"), check=False)
        assert code != 0 and "certificate" in said, said
        code, said = _run(client, "nbdinfo", server.uri, check=False)
        assert code != 0 and "requires TLS" in said, said
        code, said = _run(client, "nbdinfo", "--list", server.uri.replace("/disk", "/"), check=False)
        assert code != 0 and "disk" not in said, said
        server.stop()
        os.remove(back)


def clients_with_the_key_come_through_tls_and_others_do_not(client):
    ours, others = _keys(client, "known"), _keys(client, "unknown")
    source, back = client.image_with_data(), client.path("back.img")
    server = client.serve_nbd("mem:size=64M", f",tls-psk={ours}/keys.psk")
    uri = _secured(server, False, f"tls-psk-file={ours}/keys.psk", "alice@")
    _run(client, "nbdcopy", "--flush", source, uri)
    _run(client, "nbdcopy", uri, back)
    assert sha256(source) == sha256(back)
    said = _qemu_io(client, server, False, f"tls-creds-psk,username=alice,dir={ours}", "write -P 0xa5 1M 4M", "read -P 0xa5 1M 4M")
    assert "failed" not in said, said
    code, said = _run(client, "nbdinfo", _secured(server, False, f"tls-psk-file={others}/keys.psk", "alice@"), check=False)
    assert code != 0 and "handshake" in said, said


def tls_is_for_those_who_ask_where_it_is_allowed(client):
    ours = _certificates(client, "known")
    server = client.serve_nbd("mem:size=64M", f",tls=allow,tls-certificates={ours}")
    for uri, has_tls in ((server.uri, False), (_secured(server, False, f"tls-certificates={ours}"), True)):
        assert json.loads(_run(client, "nbdinfo", "--json", uri))["TLS"] is has_tls, uri


def a_disk_of_a_server_with_tls_is_served_on(client):
    """Two confined servers: the second is the first one's client, through TLS."""
    ours = _certificates(client, "known")
    source, back = client.image_with_data(), client.path("back.img")
    first = client.serve_nbd("mem:size=64M", f",tls-certificates={ours},tls-verify-peer=on", True)
    second = client.serve_nbd(f"nbd:host=localhost,port={first.port},export=disk,tls-certificates={ours}")
    _run(client, "nbdcopy", "--flush", source, second.uri)
    _run(client, "nbdcopy", second.uri, back)
    assert sha256(source) == sha256(back)
    second.stop()


def _secured(server, tcp, parameter, user=""):
    return server.uri.replace("nbd", "nbds", 1).replace("://", f"://{user}", 1) + ("?" if tcp else "&") + parameter


def _qemu_io(client, server, tcp, credentials, *commands):
    where = f"host=127.0.0.1,port={server.port}" if tcp else f"path={server.socket},tls-hostname=localhost"
    if "psk" in credentials:
        where = where.replace(",tls-hostname=localhost", "")
    orders = [word for command in commands for word in ("-c", command)]
    return _run(client, "qemu-io", "--object", f"{credentials},id=tls,endpoint=client", "--image-opts",
                f"driver=nbd,{where},export=disk,tls-creds=tls", *orders)


def _keys(client, name):
    """A directory with a file of keys, as psktool writes it."""
    directory = client.path(name)
    os.mkdir(directory)
    with open(os.open(os.path.join(directory, "keys.psk"), os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write(f"alice:{os.urandom(32).hex()}\n")
    return directory


def _certificates(client, name):
    """A directory with an authority's certificate, and those of a server and of a client."""
    directory = client.path(name)
    os.mkdir(directory)

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=RUN_TIMEOUT_S)

    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    openssl("req", "-x509", *new_key, "-days", "2", "-subj", f"/CN=authority of {name}", "-keyout", "ca-key.pem", "-out",
            "ca-cert.pem")
    with open(os.path.join(directory, "extensions"), "w") as file:
        file.write("subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:false\n")
    for role in ("server", "client"):
        openssl("req", *new_key, "-subj", f"/CN={role}", "-keyout", f"{role}-key.pem", "-out", "request.pem")
        openssl("x509", "-req", "-in", "request.pem", "-CA", "ca-cert.pem", "-CAkey", "ca-key.pem", "-CAcreateserial",
                "-days", "2", "-extfile", "extensions", "-out", f"{role}-cert.pem")
    return directory


def fio_verifies_through_its_nbd_engine(client):
    fio = shutil.which("fio")
    if fio is None or "nbd" not in subprocess.run([fio, "--enghelp"], capture_output=True, text=True).stdout.split():
        raise Skipped("no fio with an nbd engine on this machine")
    for tcp in OVER_BOTH:
        server = client.serve_nbd("mem:size=64M", tcp=tcp)
        result = client.path("fio.json")
        subprocess.run(
            [fio, "--name=job", "--ioengine=nbd", f"--uri={server.uri}", "--size=32m", "--bs=4k", "--iodepth=32",
             "--rw=randwrite", "--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0", "--randrepeat=1",
             "--output-format=json", f"--output={result}"], check=True, timeout=RUN_TIMEOUT_S, cwd=client.scratch)
        with open(result) as file:
            job = json.load(file)["jobs"][0]
        assert job["error"] == 0 and job["read"]["total_ios"] == 8192, job
        server.stop()


def a_socket_that_systemd_passes_is_served(client):
    """What systemd does: it listens, and starts the program with the socket as descriptor 3."""
    path = client.path("activated.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        held = os.dup(listener.fileno())
        command = [paths.FREESTONE, "serve", "--device", "mem:size=16M", "--export", "nbd:listen=systemd:disk"]
        # The shell's pid is the program's.
        script = f'exec 3<&{held} {held}<&-; LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=disk exec "$@"'
        process = subprocess.Popen(["bash", "-c", script, "sh", *command], pass_fds=[held], stdout=subprocess.PIPE)
        os.close(held)
    try:
        assert json.loads(_run(client, "nbdinfo", "--json", f"nbd+unix:///?socket={path}"))["exports"]
        process.terminate()
        assert process.wait(RUN_TIMEOUT_S) == 0
        assert os.path.exists(path), "the socket is systemd's"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


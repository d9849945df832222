"""What programs rely on, and what they get wrong, over the driver io_uring on files."""

import asyncio
import errno
import gc
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import MutableMapping

import blkio

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"


class OnFile(unittest.TestCase):
    """A file of 1 MiB, a device over it, and a queue."""

    def setUp(self):
        directory = tempfile.TemporaryDirectory(dir=os.getcwd())
        self.addCleanup(directory.cleanup)
        self.path = os.path.join(directory.name, "disk")
        with open(self.path, "wb") as file:
            file.truncate(1 << 20)
        self.device = blkio.open("io_uring", path=self.path)
        self.addCleanup(self.device.close)
        self.queue = self.device.queue()

    def assertErrno(self, number, call, *arguments, **options):
        with self.assertRaises(blkio.Error) as caught:
            call(*arguments, **options)
        self.assertEqual(caught.exception.errno, number)
        return str(caught.exception)


class Devices(OnFile):
    def test_properties_are_a_mapping_of_typed_values(self):
        properties = self.device.properties
        self.assertIsInstance(properties, MutableMapping)
        self.assertEqual(properties["capacity"], 1 << 20)
        self.assertIs(properties["can-grow"], True)
        self.assertEqual(properties["driver"], "io_uring")
        self.assertEqual(dict(properties)["num-queues"], 1)
        self.assertEqual(len(properties), len(list(properties)))
        self.assertIsNone(properties.get("nonsense"))
        with self.assertRaises(KeyError):
            properties["nonsense"]
        self.assertIn("nonsense", self.assertErrno(errno.ENOENT, properties.__getitem__, "nonsense"))

    def test_properties_are_set_in_their_states(self):
        device = blkio.Device("io_uring", {"path": self.path}, num_queues=2, read_only=True)
        self.assertEqual(device.state, "created")
        self.assertErrno(errno.ENODEV, device.properties.__getitem__, "capacity")
        self.assertErrno(errno.EINVAL, device.properties.__setitem__, "read-only", "maybe")
        self.assertErrno(errno.EACCES, device.properties.__setitem__, "capacity", 1)
        with self.assertRaises(TypeError):
            device.properties["path"] = 1.5
        with self.assertRaises(TypeError):
            del device.properties["path"]
        device.connect()
        self.assertEqual((device.state, device.properties["num-queues"]), ("connected", 2))
        self.assertErrno(errno.EBUSY, device.properties.__setitem__, "path", "x")
        self.assertErrno(errno.EBUSY, device.queue)
        device.properties["num-entries"] = 8
        with device.start() as same:
            self.assertIs(same, device)
            self.assertErrno(errno.EBADF, device.queue(1).write, 0, b"x")
            self.assertErrno(errno.ENOENT, device.queue, 2)
        self.assertEqual(device.state, "closed")

    def test_a_device_that_cannot_be_opened_is_named(self):
        self.assertIn("floppy", self.assertErrno(errno.ENOENT, blkio.open, "floppy"))
        missing = self.path + ".missing"
        self.assertIn(missing, self.assertErrno(errno.ENOENT, blkio.open, "io_uring", path=missing))
        self.assertErrno(errno.EINVAL, blkio.open, "io_uring")

    def test_closed_things_say_so(self):
        buffer = self.device.buffer(512)
        self.device.close()
        self.device.close()
        self.queue.close()
        for use in (
            lambda: self.queue.read(0, 512),
            lambda: self.queue.wait(),
            lambda: self.queue.fileno(),
            lambda: self.device.queue(),
            lambda: self.device.buffer(1),
            lambda: self.device.start(),
            lambda: self.device.properties["capacity"],
        ):
            with self.assertRaises(blkio.ClosedError) as caught:
                use()
            self.assertIsInstance(caught.exception, (OSError, ValueError))
            self.assertIn("closed", str(caught.exception))
        buffer[0] = 7
        self.assertEqual(buffer[0], 7, "memory outlives its device")

    def test_queues_are_lent_once_and_added(self):
        self.assertErrno(errno.EBUSY, self.device.queue)
        with self.device.add_queue() as added:
            added.write(0, b"from another queue")
        self.queue.close()
        with self.device.queue() as again:
            self.assertEqual(bytes(again.read(5, 7)), b"another")


class Buffers(OnFile):
    def test_memory_is_viewed_without_a_copy(self):
        buffer = self.device.buffer(4096)
        with memoryview(buffer) as view, memoryview(buffer) as other:
            self.assertEqual((len(view), view.readonly, view.itemsize), (4096, False, 1))
            view[10:14] = b"abcd"
            self.assertEqual(bytes(other[10:14]), b"abcd")
        self.assertEqual(buffer[10:12], b"ab")
        buffer[-1] = 255
        self.assertEqual(buffer[4095], 255)
        with self.assertRaises(IndexError):
            buffer[4096]
        buffer.resize(12)
        self.assertEqual((len(buffer), bytes(buffer)[10:]), (12, b"ab"))
        with self.assertRaises(ValueError):
            buffer.resize(buffer.capacity + 1)
        with self.assertRaises(TypeError):
            blkio.Buffer()
        self.assertErrno(errno.EINVAL, self.device.buffer, 1 << 40)
        with self.assertRaises(OverflowError):
            self.device.buffer(-1)

    def test_a_viewed_buffer_is_not_given_to_a_request(self):
        buffer = self.device.buffer(512)
        view = memoryview(buffer)
        with self.assertRaises(BufferError):
            self.queue.read(0, buffer)
        with self.assertRaises(BufferError):
            buffer.resize(1)
        whole = self.device.buffer(512)
        with self.assertRaises(BufferError):
            self.queue.readv(0, [whole, buffer])
        self.assertFalse(whole.in_flight)
        view.release()
        self.queue.read(0, buffer)

    def test_a_buffer_in_flight_is_not_looked_at(self):
        buffer = self.device.buffer(512)
        request = self.queue.submit_read(0, buffer)
        self.assertTrue(buffer.in_flight)
        for use in (
            lambda: memoryview(buffer),
            lambda: buffer[0],
            lambda: len(buffer),
            lambda: bytes(buffer),
            lambda: buffer.resize(1),
            lambda: self.queue.submit_write(0, buffer),
            lambda: self.queue.submit_readv(0, [self.device.buffer(1), buffer]),
        ):
            with self.assertRaises(BufferError):
                use()
        self.assertIs(request.result(), buffer)
        self.assertEqual(buffer[0], 0)

    def test_a_view_outlives_buffer_queue_and_device(self):
        view = memoryview(self.queue.read(0, 4096))
        self.device.close()
        del self.device, self.queue
        gc.collect()
        view[0] = 1
        self.assertEqual(view[0], 1)
        view.release()
        self.device = blkio.Device("io_uring")


class Requests(OnFile):
    def test_blocking_calls_transfer_bytes(self):
        self.queue.write(100, b"hello")
        self.queue.write(105, bytearray(b" wor"), fua=True)
        self.queue.write(109, memoryview(b"xldx")[1:3])
        self.queue.flush()
        self.assertEqual(self.queue.read(100, 11)[:], b"hello world")
        self.queue.write_zeroes(100, 2, no_unmap=True)
        self.queue.discard(4096, 4096)
        parts = [self.device.buffer(3), self.device.buffer(4)]
        self.assertEqual([bytes(part) for part in self.queue.readv(100, parts)], [b"\0\0l", b"lo w"])
        self.queue.writev(0, [b"ab", parts[1]])
        self.assertEqual(bytes(self.queue.read(0, 6)), b"ablo w")
        with open(self.path, "rb") as file:
            self.assertEqual(file.read(6), b"ablo w")

    def test_an_invalid_request_is_an_error_with_errno(self):
        self.assertIn("beyond", self.assertErrno(errno.EINVAL, self.queue.read, (1 << 63) - 512, 4096))
        self.assertErrno(errno.ENOTSUP, self.queue.report_zones, 0, 4)
        self.assertErrno(errno.ENOTSUP, self.queue.manage_zones, "reset")
        with self.assertRaises(ValueError):
            self.queue.manage_zones("explode")
        for arguments in ((0, "text"), (0, None), ("0", 512), (-1, 512), (0, [1])):
            with self.assertRaises((TypeError, OverflowError), msg=str(arguments)):
                self.queue.read(*arguments)
        with self.assertRaises(TypeError):
            self.queue.write(0, "text")
        with self.assertRaises(TypeError):
            self.queue.readv(0, [b"bytes"])
        with self.assertRaises(ValueError):
            self.queue.wait(0, timeout=float("nan"))
        self.assertEqual(self.queue.outstanding, 0)

    def test_many_requests_are_in_flight(self):
        writes = [self.queue.submit_write(i * 512, bytes([i % 256]) * 512) for i in range(1000)]
        self.assertEqual(self.queue.outstanding, 1000)
        ended = []
        while self.queue.outstanding:
            ended += self.queue.wait(100, timeout=30)
        self.assertEqual(set(ended), set(writes))
        self.assertTrue(all(write.done for write in ended))
        reads = [self.queue.submit_read(i * 512, 512) for i in range(1000)]
        for i in reversed(range(1000)):
            self.assertEqual(reads[i].result()[511], i % 256)
        self.assertEqual(self.queue.wait(1), [], "results were fetched already")
        self.assertEqual(self.queue.poll(), [])

    def test_forgotten_requests_are_carried_out(self):
        for i in range(100):
            self.queue.submit_write(i * 512, b"x" * 512)
        gc.collect()
        self.queue.close()
        with open(self.path, "rb") as file:
            self.assertEqual(file.read(51200), b"x" * 51200)

    def test_closing_ends_what_is_in_flight(self):
        reads = [self.queue.submit_read(0, 1 << 16) for _ in range(200)]
        self.device.close()
        for read in reads:
            self.assertEqual(len(read.result()), 1 << 16)

    def test_dropping_everything_with_requests_in_flight_is_harmless(self):
        queue = self.device.add_queue()
        for _ in range(100):
            queue.submit_read(0, 1 << 16)
        queue.poll()
        del queue
        gc.collect()
        self.assertEqual(self.queue.read(0, 1)[0], 0)

    def test_a_program_may_end_with_requests_in_flight(self):
        program = """
import blkio, sys
device = blkio.open("io_uring", path=sys.argv[1])
queue = device.queue()
requests = [queue.submit_read(0, 1 << 16) for _ in range(100)]
queue.poll()
"""
        command = [sys.executable, "-X", "dev", "-c", program, self.path]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        self.assertEqual((result.returncode, result.stderr), (0, ""))

    def test_each_thread_uses_its_own_queue(self):
        errors = []

        def work(queue, base):
            try:
                for i in range(300):
                    queue.write(base + i * 512, bytes([i % 256]) * 512)
                    assert queue.read(base + i * 512, 512)[0] == i % 256
            except Exception as error:
                errors.append(error)

        queues = [self.device.add_queue() for _ in range(2)]
        threads = [threading.Thread(target=work, args=(q, i << 19)) for i, q in enumerate(queues)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(errors, [])


class Asyncio(OnFile):
    def test_awaited_requests_run_together(self):
        async def main():
            writes = (self.queue.awrite(i * 4096, bytes([i]) * 4096) for i in range(64))
            await asyncio.gather(*writes)
            await self.queue.aflush()
            buffers = await asyncio.gather(*(self.queue.aread(i * 4096, 4096) for i in range(64)))
            self.assertEqual([buffer[4095] for buffer in buffers], list(range(64)))
            await self.queue.awrite_zeroes(0, 4096, no_unmap=True)
            await self.queue.adiscard(4096, 4096)
            await self.queue.awritev(8192, [b"a", b"b"])
            [buffer] = await self.queue.areadv(8192, [self.device.buffer(3)])
            self.assertEqual(bytes(buffer), b"ab\2")
            with self.assertRaises(blkio.Error) as caught:
                await self.queue.areport_zones(0, 1)
            self.assertEqual(caught.exception.errno, errno.ENOTSUP)

        for _ in range(2):
            asyncio.run(main())
        self.assertEqual(self.queue.wait(0), [], "what is awaited is not listed")
        self.assertEqual(self.queue.read(8192, 1)[0], ord("a"), "blocking calls work again")

    def test_the_loop_goes_on_meanwhile(self):
        async def main():
            ticks = 0

            async def tick():
                nonlocal ticks
                while True:
                    ticks += 1
                    await asyncio.sleep(0)

            ticking = asyncio.create_task(tick())
            for _ in range(20):
                await self.queue.aread(0, 1 << 20)
            ticking.cancel()
            return ticks

        self.assertGreater(asyncio.run(main()), 10)

    def test_forgotten_and_cancelled_awaitables_are_harmless(self):
        async def main():
            buffers = [self.device.buffer(1 << 16) for _ in range(50)]
            for buffer in buffers[:25]:
                self.queue.aread(0, buffer)
            tasks = [asyncio.ensure_future(self.queue.aread(0, buffer)) for buffer in buffers[25:]]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.queue.awrite(4096, b"forgotten")
            return buffers

        buffers = asyncio.run(main())
        self.queue.close()
        self.assertFalse(any(buffer.in_flight for buffer in buffers))
        with open(self.path, "rb") as file:
            file.seek(4096)
            self.assertEqual(file.read(9), b"forgotten")

    def test_closing_ends_awaited_requests(self):
        async def main():
            reads = [self.queue.aread(0, 4096) for _ in range(50)]
            self.queue.close()
            with self.assertRaises(blkio.ClosedError):
                self.queue.aread(0, 4096)
            return [len(buffer) for buffer in await asyncio.gather(*reads)]

        self.assertEqual(asyncio.run(main()), [4096] * 50)

    def test_without_a_loop_there_is_an_error_and_no_request(self):
        with self.assertRaises(RuntimeError):
            self.queue.aread(0, 512)
        self.assertEqual(self.queue.outstanding, 0)


class SlowDevice(unittest.TestCase):
    """What happens while a request takes its time: the server answers when it is told to."""

    def setUp(self):
        self.server = SlowServer()
        self.addCleanup(self.server.close)
        self.device = blkio.open("nbd", uri=f"nbd://127.0.0.1:{self.server.port}")
        self.queue = self.device.queue()
        self.addCleanup(self.device.close)
        self.addCleanup(self.server.answer.set)

    def test_a_timeout_leaves_the_request_in_flight(self):
        request = self.queue.submit_read(0, 512)
        start = time.monotonic()
        self.assertEqual(self.queue.wait(1, timeout=0.25), [])
        with self.assertRaises(TimeoutError):
            request.result(timeout=0.05)
        self.assertGreater(time.monotonic() - start, 0.3)
        self.assertFalse(request.done)
        self.server.answer.set()
        self.assertEqual(bytes(request.result(timeout=30)), b"s" * 512)

    def test_a_signal_interrupts_waiting(self):
        class Interrupted(Exception):
            pass

        def interrupt(*_):
            raise Interrupted

        self.addCleanup(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, interrupt))
        buffer = self.device.buffer(512)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with self.assertRaises(Interrupted):
            self.queue.read(0, buffer)
        self.assertTrue(buffer.in_flight)
        self.server.answer.set()
        self.assertEqual(len(self.queue.wait(1, timeout=30)), 1)
        self.assertEqual(buffer[0], ord("s"))

    def test_a_thread_that_waits_stops_only_users_of_its_queue(self):
        results = []
        thread = threading.Thread(target=lambda: results.append(self.queue.read(0, 512)))
        thread.start()
        self.server.asked.wait(30)
        with self.assertRaises(blkio.Error) as caught:
            self.queue.poll()
        self.assertEqual(caught.exception.errno, errno.EBUSY)
        self.assertEqual(results, [])
        self.server.answer.set()
        thread.join()
        self.assertEqual(results[0][0], ord("s"))

    def test_an_awaitable_that_is_given_up_leaves_its_buffer_to_the_device(self):
        buffer = self.device.buffer(512)

        async def give_up():
            with self.assertRaises(TimeoutError):
                await asyncio.wait_for(self.queue.aread(0, buffer), 0.05)

        asyncio.run(give_up())
        self.assertTrue(buffer.in_flight)
        with self.assertRaises(BufferError):
            memoryview(buffer)
        self.server.answer.set()

        async def go_on():
            return await self.queue.aread(0, 512)

        self.assertEqual(asyncio.run(go_on())[0], ord("s"))
        self.queue.close()
        self.assertEqual(bytes(buffer), b"s" * 512)

    def test_a_queue_that_is_dropped_waits_without_the_interpreter_lock(self):
        self.queue.submit_read(0, 512)
        self.queue.poll()
        # Only a thread that runs meanwhile makes the device answer.
        threading.Timer(0.1, self.server.answer.set).start()
        del self.queue
        gc.collect()
        self.assertTrue(self.server.answer.is_set())

    def test_two_loops_do_not_share_a_queue(self):
        async def one():
            read = self.queue.aread(0, 512)
            other = await asyncio.to_thread(lambda: asyncio.run(two()))
            self.assertIn("another event loop", other)
            self.server.answer.set()
            await read

        async def two():
            try:
                await self.queue.aread(0, 512)
            except RuntimeError as error:
                return str(error)

        asyncio.run(one())


class SlowServer:
    """An NBD server on a port of this host: 1 MiB of the letter s, as soon as `answer` is set."""

    def __init__(self):
        self.answer = threading.Event()
        self.asked = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self.answer.set()
        # Wakes who accepts, which closing does not.
        self._listener.shutdown(socket.SHUT_RDWR)

    def _accept(self):
        with self._listener:
            try:
                while True:
                    connection, _ = self._listener.accept()
                    threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except OSError:
                pass

    def _serve(self, connection):
        with connection, connection.makefile("rwb") as stream:
            try:
                if self._negotiate(stream):
                    self._transmit(stream)
            except (OSError, struct.error):
                pass

    def _negotiate(self, stream):
        stream.write(b"NBDMAGICIHAVEOPT" + struct.pack(">H", 3))
        stream.flush()
        stream.read(4)
        while True:
            _, option, length = struct.unpack(">8sII", stream.read(16))
            stream.read(length)

            def reply(kind, data=b""):
                stream.write(struct.pack(">QIII", 0x3E889045565A9, option, kind, len(data)) + data)

            if option == 7:  # NBD_OPT_GO, with NBD_INFO_EXPORT: size and flags
                reply(3, struct.pack(">HQH", 0, 1 << 20, 1))
                reply(1)
            else:
                reply(0x80000001)
            stream.flush()
            if option == 7:
                return True

    def _transmit(self, stream):
        while True:
            _, _, kind, cookie, _, length = struct.unpack(">IHHQQI", stream.read(28))
            if kind == 2:
                return
            self.asked.set()
            self.answer.wait()
            stream.write(struct.pack(">IIQ", 0x67446698, 0, cookie) + (b"s" * length if kind == 0 else b""))
            stream.flush()


class Examples(OnFile):
    def run_example(self, name, *arguments):
        command = [sys.executable, str(EXAMPLES / name), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    def test_info_prints_properties(self):
        result = self.run_example("info.py", "io_uring", f"path={self.path}")
        self.assertIn("capacity = 1048576\n", result.stdout, result.stderr)
        result = self.run_example("info.py", "io_uring", "path=/missing")
        self.assertIn("/missing", result.stderr)
        self.assertEqual(result.returncode, 1)

    def test_copy_copies(self):
        data = os.urandom((5 << 20) + 777)
        source, target = self.path + ".source", self.path + ".target"
        pathlib.Path(source).write_bytes(data)
        pathlib.Path(target).touch()
        result = self.run_example("copy_device.py", source, target)
        self.assertEqual(result.stdout, f"{len(data)} bytes\n", result.stderr)
        self.assertEqual(pathlib.Path(target).read_bytes(), data)


if __name__ == "__main__":
    unittest.main()

/* The end: with requests that are not done, and with a server that goes first. */
#define _GNU_SOURCE
#include "device.h"
#include "harness.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <signal.h>
#include <unistd.h>

TEST(destroy_with_requests_enqueued_only, 0)
{
    struct device d = open_device();
    for (int i = 0; i < 1000; i++)
        blkioq_read(d.q, 0, d.buf + (i % 64) * 4096, d.unit, NULL, 0);
    blkio_destroy(&d.b);
}

TEST(destroy_with_completions_that_were_not_taken, 0)
{
    struct device d = open_device();
    for (int i = 0; i < 300; i++)
        blkioq_read(d.q, 0, d.buf + (i % 64) * 4096, d.unit, NULL, i % 3 ? 0 : 1u << 31);
    CHECK_RET(blkioq_do_io(d.q, NULL, 0, 0, NULL), 0);
    usleep(20000);
    blkio_destroy(&d.b);
}

TEST(destroy_with_requests_in_flight, SERVER)
{
    struct device d = open_device();
    stop_process(options.server);
    for (int i = 0; i < 4; i++)
        blkioq_read(d.q, 0, d.buf + i * 4096, 4096, NULL, 0);
    CHECK_RET(blkioq_do_io(d.q, NULL, 0, 0, NULL), 0);
    let_continue_after(options.server, 0.1);
    blkio_destroy(&d.b);
    CHECK(d.b == NULL);
}

/* The program's own memory is the program's again when destroy has returned. libblkio 1.5.0 does not wait. */
TEST(no_request_writes_to_memory_after_destroy, SERVER | STRICT)
{
    struct device d = open_device();
    int fd = memfd_create("own", MFD_CLOEXEC);
    CHECK_EQ(ftruncate(fd, 64 * KIB), 0);
    struct blkio_mem_region r = {.len = 64 * KIB, .fd = fd};
    r.addr = mmap(NULL, r.len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(r.addr != MAP_FAILED);
    CHECK_RET(blkio_map_mem_region(d.b, &r), 0);
    memset(r.addr, 0x5a, r.len);
    stop_process(options.server);
    for (size_t i = 0; i < 4; i++)
        blkioq_read(d.q, 0, (char *)r.addr + i * 4096, 4096, NULL, 0);
    CHECK_RET(blkioq_do_io(d.q, NULL, 0, 0, NULL), 0);
    let_continue_after(options.server, 0.1);
    blkio_destroy(&d.b);
    memset(r.addr, 0xa5, r.len);
    usleep(300000);
    for (size_t i = 0; i < r.len; i++)
        if (((unsigned char *)r.addr)[i] != 0xa5)
            FAIL("byte %zu was written after destroy", i);
    munmap(r.addr, r.len);
    close(fd);
}

/* A server of our own, so that it can be killed. */
struct peer {
    pid_t pid;
    char directory[64], socket[96];
};

static struct peer start_peer(void)
{
    struct peer peer = {.directory = "/tmp/capi-peer-XXXXXX"};
    char command[4096];
    CHECK(mkdtemp(peer.directory) != NULL);
    snprintf(peer.socket, sizeof peer.socket, "%s/sock", peer.directory);
    const char *place = strstr(options.peer, "{}");
    CHECK(place != NULL);
    snprintf(command, sizeof command, "exec %.*s%s%s", (int)(place - options.peer), options.peer, peer.socket,
             place + 2);
    peer.pid = fork();
    if (peer.pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(127);
    }
    for (int i = 0; i < 6000 && access(peer.socket, F_OK) != 0; i++)
        usleep(10000);
    CHECK_EQ(access(peer.socket, F_OK), 0);
    usleep(50000);
    return peer;
}

static void kill_peer(struct peer *peer)
{
    kill(peer->pid, SIGKILL);
    CHECK_EQ(waitpid(peer->pid, NULL, 0), peer->pid);
}

static void forget_peer(struct peer *peer)
{
    unlink(peer->socket);
    rmdir(peer->directory);
}

static struct device open_peer(struct peer *peer)
{
    struct device d = {.b = created(), .unit = 4096};
    CHECK_RET(blkio_set_str(d.b, "path", peer->socket), 0);
    CHECK_RET(blkio_connect(d.b), 0);
    if (options.poll) {
        CHECK_RET(blkio_set_int(d.b, "num-queues", 0), 0);
        CHECK_RET(blkio_set_int(d.b, "num-poll-queues", 1), 0);
    }
    CHECK_RET(blkio_start(d.b), 0);
    d.q = options.poll ? blkio_get_poll_queue(d.b, 0) : blkio_get_queue(d.b, 0);
    map_region(&d);
    return d;
}

TEST(a_peer_that_goes_between_requests_is_an_error_and_no_hang, PEER | STRICT)
{
    struct peer peer = start_peer();
    struct device d = open_peer(&peer);
    CHECK_EQ(do_read(&d, 0, d.buf, d.unit), 0);
    kill_peer(&peer);
    CHECK(do_read(&d, 0, d.buf, d.unit) < 0);
    CHECK(do_write(&d, 0, d.buf, d.unit) < 0);
    struct blkio_mem_region r;
    CHECK_RET(blkio_alloc_mem_region(d.b, &r, 64 * KIB), 0);
    blkio_map_mem_region(d.b, &r);
    blkio_destroy(&d.b);
    forget_peer(&peer);
}

TEST(a_peer_that_goes_with_requests_in_flight_is_an_error_and_no_hang, PEER | STRICT)
{
    struct peer peer = start_peer();
    struct device d = open_peer(&peer);
    stop_process(peer.pid);
    for (int i = 0; i < 300; i++)
        blkioq_read(d.q, 0, d.buf, 4096, &d, 0);
    CHECK_RET(blkioq_do_io(d.q, NULL, 0, 0, NULL), 0);
    kill_peer(&peer);
    for (int i = 0; i < 300; i++)
        CHECK(reap_ret(d.q, &d) < 0);
    blkio_destroy(&d.b);
    forget_peer(&peer);
}

TEST(a_peer_that_goes_wakes_the_event_loop, PEER | STRICT | REGULAR)
{
    struct peer peer = start_peer();
    struct device d = open_peer(&peer);
    struct blkio_completion c;
    int ret, fd = blkioq_get_completion_fd(d.q);
    blkioq_set_completion_fd_enabled(d.q, true);
    stop_process(peer.pid);
    blkioq_read(d.q, 0, d.buf, 4096, &d, 0);
    CHECK_RET(blkioq_do_io(d.q, NULL, 0, 0, NULL), 0);
    kill_peer(&peer);
    do {
        struct pollfd p = {fd, POLLIN, 0};
        char event[8];
        CHECK_EQ(poll(&p, 1, 60000), 1);
        CHECK_EQ(read(fd, event, 8), 8);
        ret = blkioq_do_io(d.q, &c, 0, 1, NULL);
    } while (ret == 0);
    CHECK_RET(ret, 1);
    CHECK(c.ret < 0);
    blkio_destroy(&d.b);
    forget_peer(&peer);
}

TEST(destroy_after_the_peer_went_returns, PEER)
{
    struct peer peer = start_peer();
    struct device d = open_peer(&peer);
    stop_process(peer.pid);
    for (int i = 0; i < 8; i++)
        blkioq_read(d.q, 0, d.buf + i * 4096, 4096, NULL, 0);
    CHECK_RET(blkioq_do_io(d.q, NULL, 0, 0, NULL), 0);
    kill_peer(&peer);
    blkio_destroy(&d.b);
    forget_peer(&peer);
}

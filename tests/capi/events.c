/* The completion fd. */
#define _GNU_SOURCE
#include "device.h"
#include "harness.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

static bool becomes_readable(int fd)
{
    struct pollfd p = {fd, POLLIN, 0};
    int n;
    do /* the kernel's own work for completions interrupts, too */
        n = poll(&p, 1, 60000);
    while (n < 0 && errno == EINTR);
    return n == 1;
}

static void take_event(int fd)
{
    char event[8];
    CHECK_EQ(read(fd, event, sizeof event), 8);
}

TEST(the_completion_fd_is_nonblocking_and_stays_the_same, REGULAR)
{
    struct device d = open_device();
    int fd = blkioq_get_completion_fd(d.q);
    CHECK(fd >= 0);
    CHECK(fcntl(fd, F_GETFL) & O_NONBLOCK);
    CHECK_EQ(blkioq_get_completion_fd(d.q), fd);
    close_device(&d);
    CHECK_EQ(fcntl(fd, F_GETFD), -1);
}

TEST(an_event_comes_for_each_kind_of_end, REGULAR)
{
    struct device d = open_device();
    int fd = blkioq_get_completion_fd(d.q);
    blkioq_set_completion_fd_enabled(d.q, true);
    static const uint32_t flags[] = {0, 1u << 31}; /* done by the device; refused by the library */
    for (int round = 0; round < 6; round++) {
        struct blkio_completion c;
        int ret;
        blkioq_read(d.q, 0, d.buf, d.unit, NULL, flags[round % 2]);
        CHECK_RET(blkioq_do_io(d.q, NULL, 0, 0, NULL), 0);
        do {
            if (!becomes_readable(fd))
                FAIL("no event in round %d", round);
            take_event(fd);
            ret = blkioq_do_io(d.q, &c, 0, 1, NULL);
        } while (ret == 0);
        CHECK_RET(ret, 1);
        CHECK_EQ(c.ret, round % 2 ? -EINVAL : 0);
    }
    close_device(&d);
}

TEST(a_blocking_read_of_the_fd_waits_for_the_event, REGULAR)
{
    struct device d = open_device();
    struct blkio_completion c;
    int ret, fd = blkioq_get_completion_fd(d.q);
    CHECK_EQ(fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK), 0);
    blkioq_set_completion_fd_enabled(d.q, true);
    if (options.server)
        stop_process(options.server);
    blkioq_read(d.q, 0, d.buf, 4096, NULL, 0);
    CHECK_RET(blkioq_do_io(d.q, NULL, 0, 0, NULL), 0);
    if (options.server)
        let_continue_after(options.server, 0.1);
    do {
        take_event(fd);
        ret = blkioq_do_io(d.q, &c, 0, 1, NULL);
    } while (ret == 0);
    CHECK_RET(ret, 1);
    CHECK_EQ(c.ret, 0);
    close_device(&d);
}

TEST(enabling_holds_for_requests_in_flight, SERVER | REGULAR)
{
    struct device d = open_device();
    int fd = blkioq_get_completion_fd(d.q);
    blkioq_set_completion_fd_enabled(d.q, false);
    stop_process(options.server);
    blkioq_read(d.q, 0, d.buf, 4096, &d, 0);
    CHECK_RET(blkioq_do_io(d.q, NULL, 0, 0, NULL), 0);
    blkioq_set_completion_fd_enabled(d.q, true);
    let_continue(options.server);
    CHECK(becomes_readable(fd));
    CHECK_EQ(reap_ret(d.q, &d), 0);
    close_device(&d);
}

TEST(reading_takes_the_event_away, SERVER | REGULAR)
{
    struct device d = open_device();
    int fd = blkioq_get_completion_fd(d.q);
    blkioq_set_completion_fd_enabled(d.q, true);
    blkioq_read(d.q, 0, d.buf, d.unit, &d, 0);
    CHECK_RET(blkioq_do_io(d.q, NULL, 0, 0, NULL), 0);
    CHECK(becomes_readable(fd));
    usleep(10000);
    take_event(fd);
    char event[8];
    CHECK_EQ(read(fd, event, 8), -1);
    CHECK_EQ(errno, EAGAIN);
    CHECK_EQ(reap_ret(d.q, &d), 0);
    close_device(&d);
}

/* An event that is left over from another time makes no difference. */
TEST(spurious_events_do_no_harm, REGULAR)
{
    struct device d = open_device();
    struct blkio_completion c;
    uint64_t one = 1;
    int fd = blkioq_get_completion_fd(d.q);
    CHECK_EQ(write(fd, &one, sizeof one), 8);
    blkioq_read(d.q, 0, d.buf, d.unit, &d, 0);
    CHECK_EQ(reap_ret(d.q, &d), 0);
    CHECK_EQ(write(fd, &one, sizeof one), 8);
    CHECK_RET(blkioq_do_io(d.q, &c, 0, 1, NULL), 0);
    blkioq_set_completion_fd_enabled(d.q, true);
    CHECK_EQ(write(fd, &one, sizeof one), 8);
    for (int i = 0; i < 50; i++)
        CHECK_EQ(do_read(&d, 0, d.buf, d.unit), 0);
    close_device(&d);
}

TEST(enabling_and_disabling_at_any_time_loses_nothing, REGULAR)
{
    struct device d = open_device();
    for (int i = 0; i < 500; i++) {
        blkioq_set_completion_fd_enabled(d.q, i & 1);
        blkioq_read(d.q, 0, d.buf, d.unit, &d, 0);
        if (i & 2)
            CHECK_RET(blkioq_do_io(d.q, NULL, 0, 0, NULL), 0);
        blkioq_set_completion_fd_enabled(d.q, i & 4);
        CHECK_EQ(reap_ret(d.q, &d), 0);
    }
    close_device(&d);
}

enum { REQUESTS = 3000, DEPTH = 32 };

/* Keeps DEPTH reads going by events alone, suppressing them while completions are processed. */
static void drive_by_events(struct device *d, bool suppress)
{
    int fd = blkioq_get_completion_fd(d->q), epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event interest = {.events = EPOLLIN};
    int submitted = 0, done = 0;
    CHECK_EQ(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &interest), 0);
    blkioq_set_completion_fd_enabled(d->q, true);
    while (submitted < DEPTH)
        blkioq_read(d->q, 0, d->buf + (size_t)(submitted++ % DEPTH) * d->unit, d->unit, NULL, 0);
    CHECK_RET(blkioq_do_io(d->q, NULL, 0, 0, NULL), 0);
    while (done < REQUESTS) {
        struct epoll_event event;
        int ret;
        int n = epoll_wait(epoll, &event, 1, 5000);
        if (n < 0 && errno == EINTR)
            continue; /* the kernel's own work for completions interrupts, too */
        if (n != 1)
            FAIL("no event after %d of %d requests", done, REQUESTS);
        take_event(fd);
        if (suppress)
            blkioq_set_completion_fd_enabled(d->q, false);
        do {
            struct blkio_completion c;
            ret = blkioq_do_io(d->q, &c, 0, 1, NULL);
            if (ret == 0 && suppress) {
                blkioq_set_completion_fd_enabled(d->q, true);
                ret = blkioq_do_io(d->q, &c, 0, 1, NULL);
                if (ret == 1)
                    blkioq_set_completion_fd_enabled(d->q, false);
            }
            CHECK(ret >= 0);
            if (ret == 1) {
                CHECK_EQ(c.ret, 0);
                done++;
                if (submitted < REQUESTS)
                    blkioq_read(d->q, 0, d->buf + (size_t)(submitted++ % DEPTH) * d->unit, d->unit, NULL, 0);
            }
        } while (ret == 1);
    }
    close(epoll);
}

TEST(an_event_loop_loses_no_completion, REGULAR)
{
    struct device d = open_device();
    drive_by_events(&d, false);
    close_device(&d);
}

TEST(an_event_loop_that_suppresses_events_loses_no_completion, REGULAR)
{
    struct device d = open_device();
    drive_by_events(&d, true);
    close_device(&d);
}

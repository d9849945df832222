/* Freestone's own functions: connect and start without blocking. */
#define _GNU_SOURCE
#include "device.h"
#include "harness.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* Weak: libblkio has none of them, and the suite is linked with it, too. */
#define EXTENSION __attribute__((weak))
EXTENSION int blkio_connect_begin(struct blkio *b);
EXTENSION int blkio_start_begin(struct blkio *b);
EXTENSION int blkio_get_control_fd(struct blkio *b);
EXTENSION int blkio_control_result(struct blkio *b);
EXTENSION int blkio_cancel(struct blkio *b);

static int await_control(struct blkio *b)
{
    int ret;
    while ((ret = blkio_control_result(b)) == -EAGAIN) {
        struct pollfd p = {blkio_get_control_fd(b), POLLIN, 0};
        if (poll(&p, 1, 5000) != 1)
            FAIL("the control fd does not become readable");
    }
    return ret;
}

TEST(the_extensions_exist, STRICT)
{
    CHECK(blkio_connect_begin && blkio_start_begin && blkio_get_control_fd && blkio_control_result && blkio_cancel);
}

TEST(connect_and_start_are_done_without_blocking, STRICT)
{
    struct blkio *b = created();
    CHECK_RET(blkio_get_control_fd(b), -ENOENT);
    CHECK_RET(blkio_connect_begin(b), 0);
    CHECK(blkio_get_control_fd(b) >= 0);
    CHECK_RET(await_control(b), 0);
    CHECK(get_uint64(b, "capacity") >= LEAST_CAPACITY);
    CHECK_RET(blkio_set_int(b, "num-queues", 1), 0);
    CHECK_RET(blkio_start_begin(b), 0);
    CHECK_RET(await_control(b), 0);
    struct device d = {.b = b, .q = blkio_get_queue(b, 0), .unit = 4096};
    CHECK(d.q != NULL);
    map_region(&d);
    CHECK_EQ(do_read(&d, 0, d.buf, d.unit), 0);
    close_device(&d);
}

TEST(a_result_is_given_once, STRICT)
{
    struct blkio *b = created();
    CHECK_RET(blkio_connect_begin(b), 0);
    CHECK_RET(await_control(b), 0);
    CHECK_RET(blkio_control_result(b), -ENOENT);
    struct pollfd p = {blkio_get_control_fd(b), POLLIN, 0};
    CHECK_EQ(poll(&p, 1, 0), 0);
    blkio_destroy(&b);
}

TEST(begin_in_the_wrong_state_fails_like_the_blocking_call, STRICT)
{
    struct blkio *b = created();
    int ret = blkio_start_begin(b);
    CHECK_EQ(ret == 0 ? await_control(b) : ret, -ENODEV);
    CHECK_RET(blkio_connect_begin(b), 0);
    CHECK_RET(await_control(b), 0);
    CHECK_RET(blkio_start(b), 0);
    ret = blkio_connect_begin(b);
    CHECK_EQ(ret == 0 ? await_control(b) : ret, -EBUSY);
    blkio_destroy(&b);
}

TEST(a_connect_that_fails_says_why_and_can_be_mended, STRICT)
{
    if (!has_path())
        SKIP("for drivers with a path");
    struct blkio *b = created();
    CHECK_RET(blkio_set_str(b, "path", "/nonexistent/device"), 0);
    int ret = blkio_connect_begin(b);
    CHECK_EQ(ret == 0 ? await_control(b) : ret, -ENOENT);
    CHECK(strstr(blkio_get_error_msg(), "/nonexistent/device") != NULL);
    CHECK_RET(blkio_set_str(b, "path", setting("path")), 0);
    CHECK_RET(blkio_connect_begin(b), 0);
    CHECK_RET(await_control(b), 0);
    blkio_destroy(&b);
}

static void name_deaf_server(char *path, size_t len)
{
    snprintf(path, len, "/tmp/capi-deaf-%d", getpid());
}

/* A server that takes connections and never says a word. */
static int deaf_server(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memccpy(address.sun_path, path, 0, sizeof address.sun_path);
    unlink(path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK_EQ(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    CHECK_EQ(listen(fd, 8), 0);
    return fd;
}

/* Points the driver at the server, if it is one that goes over a socket. */
static struct blkio *created_for(const char *path)
{
    struct blkio *b = created();
    char uri[200];
    if (strcmp(options.driver, "virtio-blk-vhost-user") == 0) {
        CHECK_RET(blkio_set_str(b, "path", path), 0);
    } else if (strcmp(options.driver, "nbd") == 0 && setting("uri")) {
        snprintf(uri, sizeof uri, "nbd+unix:///?socket=%s", path);
        CHECK_RET(blkio_set_str(b, "uri", uri), 0);
    } else {
        SKIP("not a driver that goes over a socket");
    }
    return b;
}

TEST(begin_returns_at_once_and_cancel_ends_it, STRICT)
{
    char path[64];
    name_deaf_server(path, sizeof path);
    struct blkio *b = created_for(path); /* before the server: it may skip, and nothing is left behind */
    int server = deaf_server(path);
    double start = seconds();
    CHECK_RET(blkio_connect_begin(b), 0);
    CHECK(seconds() - start < 10);
    struct pollfd p = {blkio_get_control_fd(b), POLLIN, 0};
    CHECK_EQ(poll(&p, 1, 200), 0);
    CHECK_RET(blkio_control_result(b), -EAGAIN);
    CHECK_RET(blkio_connect_begin(b), -EBUSY); /* one at a time */
    CHECK_RET(blkio_start(b), -EBUSY);
    CHECK_RET(blkio_set_bool(b, "read-only", true), -EBUSY);
    CHECK_RET(blkio_cancel(b), 0);
    CHECK_RET(await_control(b), -ECANCELED);
    CHECK_FAILS(blkio_start(b));
    blkio_destroy(&b);
    close(server);
    unlink(path);
}

TEST(destroy_ends_an_operation_that_runs, STRICT)
{
    char path[64];
    name_deaf_server(path, sizeof path);
    struct blkio *b = created_for(path); /* before the server: it may skip, and nothing is left behind */
    int server = deaf_server(path);
    CHECK_RET(blkio_connect_begin(b), 0);
    usleep(100000);
    double start = seconds();
    blkio_destroy(&b);
    CHECK(seconds() - start < 60);
    close(server);
    unlink(path);
}

TEST(cancel_of_nothing_does_no_harm, STRICT)
{
    struct blkio *b = created();
    blkio_cancel(b);
    CHECK_RET(blkio_connect_begin(b), 0);
    CHECK_RET(await_control(b), 0);
    blkio_cancel(b);
    CHECK_RET(blkio_start(b), 0);
    blkio_destroy(&b);
}

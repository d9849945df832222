/*
 * A program as its author built it against the reference's header and library. It must find every function, type and
 * constant in a library that it was never linked with. Usage: linked DRIVER PATH; prints the last line "ok".
 */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <blkio.h>

enum { LEN = 65536, BLOCK = 4096 };

static void check(int ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "%s: %s\n", what, blkio_get_error_msg());
        exit(1);
    }
}

static void wait_for_one(struct blkioq *q, void *user_data)
{
    struct blkio_completion completion;
    struct timespec timeout = { .tv_sec = 30 };

    check(blkioq_do_io(q, &completion, 1, 1, &timeout) == 1, "do_io");
    if (completion.ret != 0 || completion.user_data != user_data) {
        fprintf(stderr, "completion: ret %d, message %s\n", completion.ret, completion.error_msg);
        exit(1);
    }
}

/* The completion fd becomes readable, and tells no more than that. */
static void wait_by_fd(struct blkioq *q, void *user_data)
{
    struct pollfd pollfd = { .fd = blkioq_get_completion_fd(q), .events = POLLIN };
    struct blkio_completion completion;
    uint64_t count;
    int n = 0;

    while (n == 0) {
        check(poll(&pollfd, 1, 30000) == 1, "poll on the completion fd");
        check(read(pollfd.fd, &count, sizeof(count)) == sizeof(count) || errno == EAGAIN, "read of the completion fd");
        n = blkioq_do_io(q, &completion, 0, 1, NULL);
    }
    check(n == 1 && completion.ret == 0 && completion.user_data == user_data, "completion after its fd");
}

int main(int argc, char **argv)
{
    struct blkio *b;
    struct blkio_mem_region region;
    struct timespec no_time = { 0 };
    sigset_t signals;
    uint64_t capacity;
    int alignment;
    char *text;

    check(argc == 3, "usage: linked DRIVER PATH");
    check(blkio_create("no such driver", &b) < 0 && strlen(blkio_get_error_msg()) > 0, "an unknown driver");
    check(blkio_create(argv[1], &b) == 0, "create");
    check(blkio_set_str(b, "path", argv[2]) == 0, "set path");
    check(blkio_get_uint64(b, "capacity", &capacity) == -ENODEV || capacity, "capacity before connect");
    check(blkio_connect(b) == 0, "connect");
    check(blkio_get_uint64(b, "capacity", &capacity) == 0 && capacity >= 2 * LEN, "capacity");
    check(blkio_get_int(b, "request-alignment", &alignment) == 0 && BLOCK % alignment == 0, "request-alignment");
    check(blkio_get_str(b, "driver", &text) == 0 && strcmp(text, argv[1]) == 0, "driver");
    free(text);
    check(blkio_get_bool(b, "capacity", &(bool){ 0 }) == -ENOTTY, "a property of another type");
    check(blkio_start(b) == 0, "start");
    check(blkio_alloc_mem_region(b, &region, 2 * LEN) == 0, "alloc_mem_region");
    check(blkio_map_mem_region(b, &region) == 0, "map_mem_region");

    struct blkioq *q = blkio_get_queue(b, 0);
    char *out = region.addr, *in = out + LEN;
    struct iovec halves[] = { { in, LEN / 2 }, { in + LEN / 2, LEN / 2 } };

    check(q != NULL, "get_queue");
    sigemptyset(&signals);
    check(blkioq_do_io(q, NULL, 0, 0, NULL) == 0, "do_io that asks for nothing");
    for (int i = 0; i < LEN; i++)
        out[i] = i * 7 + i / 256;
    blkioq_write(q, LEN, out, LEN, out, BLKIO_REQ_FUA);
    wait_for_one(q, out);
    blkioq_flush(q, q, 0);
    wait_for_one(q, q);
    blkioq_set_completion_fd_enabled(q, true);
    blkioq_readv(q, LEN, halves, 2, in, 0);
    check(blkioq_do_io(q, NULL, 0, 0, NULL) == 0, "do_io that submits only");
    wait_by_fd(q, in);
    blkioq_set_completion_fd_enabled(q, false);
    check(memcmp(in, out, LEN) == 0, "the bytes read are those written");
    blkioq_write_zeroes(q, LEN, BLOCK, NULL, BLKIO_REQ_NO_UNMAP);
    wait_for_one(q, NULL);
    blkioq_read(q, LEN, in, 2 * BLOCK, NULL, 0);
    wait_for_one(q, NULL);
    check(in[0] == 0 && memcmp(in, in + 1, BLOCK - 1) == 0, "zeroes");
    check(memcmp(in + BLOCK, out + BLOCK, BLOCK) == 0, "what stands behind the zeroes");
    blkioq_read(q, LEN, in, BLOCK, NULL, ~0u);
    {
        struct blkio_completion completion;
        check(blkioq_do_io_interruptible(q, &completion, 1, 1, NULL, &signals) == 1 && completion.ret == -EINVAL, "unknown flags");
    }
    check(blkioq_do_io(q, &(struct blkio_completion){ 0 }, 1, 1, &no_time) < 0, "do_io with nothing in flight");
    blkio_unmap_mem_region(b, &region);
    blkio_free_mem_region(b, &region);
    blkio_destroy(&b);
    check(b == NULL, "destroy");
    puts("ok");
    return 0;
}

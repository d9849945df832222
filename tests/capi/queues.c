/* Queues and poll queues: how many, added, removed, from threads; requests without limit. */
#define _GNU_SOURCE
#include "device.h"
#include "harness.h"

#include <pthread.h>
#include <unistd.h>

static struct blkio *started_with(int queues, int poll_queues)
{
    struct blkio *b = connected();
    CHECK_RET(blkio_set_int(b, "num-queues", queues), 0);
    CHECK_RET(blkio_set_int(b, "num-poll-queues", poll_queues), 0);
    CHECK_RET(blkio_start(b), 0);
    return b;
}

static int queues_possible(int wanted)
{
    struct blkio *b = connected();
    int most = get_int(b, "max-queues");
    blkio_destroy(&b);
    return most < wanted ? most : wanted;
}

static void need_poll_queues(void)
{
    struct blkio *b = connected();
    bool supported = get_bool(b, "supports-poll-queues");
    blkio_destroy(&b);
    if (!supported)
        SKIP("supports-poll-queues is false");
    if (options.freestone || strcmp(options.driver, "io_uring") != 0)
        return;
    /* libblkio 1.5.0 takes the answer to a read of nothing for the answer to any read. */
    b = started_with(0, 1);
    struct device d = {.b = b, .q = blkio_get_poll_queue(b, 0)};
    map_region(&d);
    if (do_read(&d, 0, d.buf, 4096) == -ENOTSUP)
        SKIP("not demanded of libblkio 1.5.0");
    blkio_destroy(&b);
}

static void read_on(struct blkioq *q, struct device *d)
{
    blkioq_read(q, 0, d->buf, d->unit, d, 0);
    CHECK_EQ(reap_ret(q, d), 0);
}

TEST(there_are_no_queues_before_start, 0)
{
    struct blkio *b = created();
    for (int state = 0; state < 2; state++) {
        CHECK(blkio_get_queue(b, 0) == NULL);
        CHECK(blkio_get_poll_queue(b, 0) == NULL);
        CHECK_FAILS(blkio_add_queue(b));
        CHECK_FAILS(blkio_add_poll_queue(b));
        CHECK_RET(blkio_remove_queue(b, 0), -ENOENT);
        CHECK_RET(blkio_remove_poll_queue(b, 0), -ENOENT);
        CHECK_RET(blkio_connect(b), 0);
    }
    blkio_destroy(&b);
}

TEST(num_queues_queues_exist_and_no_other, 0)
{
    int count = queues_possible(4);
    struct blkio *b = started_with(count, 0);
    struct device d = {.b = b, .unit = 4096};
    map_region(&d);
    for (int i = 0; i < count; i++) {
        struct blkioq *q = blkio_get_queue(b, i);
        CHECK(q != NULL && q == blkio_get_queue(b, i));
        for (int j = 0; j < i; j++) {
            CHECK(q != blkio_get_queue(b, j));
            CHECK(blkioq_get_completion_fd(q) != blkioq_get_completion_fd(blkio_get_queue(b, j)));
        }
        read_on(q, &d);
    }
    CHECK(blkio_get_queue(b, count) == NULL);
    CHECK(blkio_get_queue(b, -1) == NULL);
    CHECK(blkio_get_queue(b, INT32_MAX) == NULL);
    CHECK(blkio_get_queue(b, INT32_MIN) == NULL);
    CHECK(blkio_get_poll_queue(b, 0) == NULL);
    CHECK(blkio_get_poll_queue(b, -1) == NULL);
    blkio_destroy(&b);
}

TEST(a_removed_queue_is_gone_and_others_keep_their_index, 0)
{
    if (queues_possible(3) < 3)
        SKIP("max-queues is below 3");
    struct blkio *b = started_with(3, 0);
    struct device d = {.b = b, .unit = 4096};
    map_region(&d);
    struct blkioq *second = blkio_get_queue(b, 1), *third = blkio_get_queue(b, 2);
    CHECK_RET(blkio_remove_queue(b, 0), 0);
    CHECK_RET(blkio_remove_queue(b, 0), -ENOENT);
    CHECK(blkio_get_queue(b, 0) == NULL);
    CHECK(blkio_get_queue(b, 1) == second);
    CHECK(blkio_get_queue(b, 2) == third);
    read_on(second, &d);
    CHECK_RET(blkio_remove_queue(b, 1), 0);
    read_on(third, &d);
    CHECK_RET(blkio_remove_queue(b, 2), 0);
    CHECK_RET(blkio_remove_queue(b, 2), -ENOENT);
    blkio_destroy(&b);
}

TEST(removal_of_a_queue_that_never_was_is_enoent, 0)
{
    struct blkio *b = started_with(1, 0);
    static const int wrong[] = {1, 77, -1, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK_RET(blkio_remove_queue(b, wrong[i]), -ENOENT);
        CHECK_RET(blkio_remove_poll_queue(b, wrong[i]), -ENOENT);
    }
    CHECK_RET(blkio_remove_poll_queue(b, 0), -ENOENT);
    blkio_destroy(&b);
}

TEST(a_queue_added_before_the_start_is_refused, 0)
{
    struct blkio *b = created();
    int expected = get_bool(b, "can-add-queues") ? -EBUSY : -ENOTSUP;
    CHECK_RET(blkio_add_queue(b), expected);
    CHECK_RET(blkio_add_poll_queue(b), expected);
    CHECK_RET(blkio_connect(b), 0);
    CHECK_RET(blkio_add_queue(b), expected);
    CHECK_RET(blkio_add_poll_queue(b), expected);
    blkio_destroy(&b);
}

TEST(queues_are_added_where_can_add_queues_says_so, 0)
{
    struct device d = open_device();
    if (!get_bool(d.b, "can-add-queues")) {
        CHECK_RET(blkio_add_queue(d.b), -ENOTSUP);
        CHECK_RET(blkio_add_poll_queue(d.b), -ENOTSUP);
        close_device(&d);
        SKIP("can-add-queues is false: -ENOTSUP");
    }
    int first = blkio_add_queue(d.b), second = blkio_add_queue(d.b);
    CHECK(first >= 0 && second >= 0 && first != second);
    read_on(blkio_get_queue(d.b, first), &d);
    read_on(blkio_get_queue(d.b, second), &d);
    CHECK_RET(blkio_remove_queue(d.b, first), 0);
    read_on(blkio_get_queue(d.b, second), &d);
    CHECK_RET(blkio_add_queue(d.b), first); /* the lowest that is free */
    read_on(blkio_get_queue(d.b, first), &d);
    read_on(d.q, &d);
    close_device(&d);
}

TEST(an_instance_starts_with_no_queue_if_queues_can_be_added, 0)
{
    struct blkio *b = connected();
    bool can_add = get_bool(b, "can-add-queues");
    CHECK_RET(blkio_set_int(b, "num-queues", 0), 0);
    if (!can_add) {
        CHECK_RET(blkio_start(b), -EINVAL);
        CHECK_RET(blkio_set_int(b, "num-queues", 1), 0);
        CHECK_RET(blkio_start(b), 0);
    } else {
        CHECK_RET(blkio_start(b), 0);
        CHECK(blkio_get_queue(b, 0) == NULL);
        struct device d = {.b = b, .unit = 4096};
        map_region(&d);
        CHECK_RET(blkio_add_queue(b), 0);
        read_on(blkio_get_queue(b, 0), &d);
    }
    blkio_destroy(&b);
}

TEST(adding_and_removing_queues_leaks_no_descriptor, 0)
{
    struct device d = open_device();
    int fds = 0;
    if (!get_bool(d.b, "can-add-queues"))
        SKIP("can-add-queues is false");
    for (int i = 0; i < 20; i++) {
        int index = blkio_add_queue(d.b);
        read_on(blkio_get_queue(d.b, index), &d);
        CHECK_RET(blkio_remove_queue(d.b, index), 0);
        if (i == 0)
            fds = count_open_fds();
    }
    CHECK(open_fds_return_to(fds));
    close_device(&d);
}

TEST(a_queue_is_removed_with_requests_in_flight, SERVER | REGULAR)
{
    int count = queues_possible(2);
    if (count < 2)
        SKIP("max-queues is 1");
    struct blkio *b = started_with(2, 0);
    struct device d = {.b = b, .unit = 4096};
    map_region(&d);
    struct blkioq *q = blkio_get_queue(b, 1);
    stop_process(options.server);
    for (int i = 0; i < 4; i++)
        blkioq_read(q, 0, d.buf + i * 4096, 4096, NULL, 0);
    CHECK_RET(blkioq_do_io(q, NULL, 0, 0, NULL), 0);
    let_continue_after(options.server, 0.1);
    CHECK_RET(blkio_remove_queue(b, 1), 0);
    read_on(blkio_get_queue(b, 0), &d);
    blkio_destroy(&b);
}

/* Depth */

static void many_requests(struct device *d, int count)
{
    static bool seen[20000];
    struct blkio_completion c[64];
    memset(seen, 0, sizeof seen);
    for (int i = 0; i < count; i++)
        blkioq_read(d->q, (uint64_t)(i % 64) * d->unit, d->buf + (size_t)(i % 64) * d->unit, d->unit,
                    (void *)(uintptr_t)i, i % 100 == 99 ? 1u << 31 : 0);
    for (int done = 0; done < count;) {
        struct timespec limit = {60, 0};
        int n = blkioq_do_io(d->q, c, 1, 64, &limit);
        if (n < 1)
            FAIL("after %d of %d requests: %s (%s)", done, count, words(n), blkio_get_error_msg());
        for (int i = 0; i < n; i++) {
            uintptr_t which = (uintptr_t)c[i].user_data;
            CHECK(which < (uintptr_t)count && !seen[which]);
            seen[which] = true;
            CHECK_EQ(c[i].ret, which % 100 == 99 ? -EINVAL : 0);
        }
        done += n;
    }
    CHECK_RET(blkioq_do_io(d->q, c, 0, 1, NULL), 0);
}

TEST(requests_are_enqueued_without_limit, 0)
{
    struct device d = open_device();
    many_requests(&d, 20000);
    many_requests(&d, 5000);
    close_device(&d);
}

TEST(requests_are_enqueued_without_limit_on_the_smallest_queue, 0)
{
    struct blkio *b = connected();
    const char *property = has_property(b, "queue-size") ? "queue-size" : "num-entries";
    if (!has_property(b, property))
        SKIP("no property for the size of queues");
    blkio_destroy(&b);
    struct device d = open_device_with(property, strcmp(property, "queue-size") == 0 ? 4 : 1);
    many_requests(&d, 5000);
    close_device(&d);
}

/* libblkio 1.5.0 waits for ever for more descriptors than the ring has. */
TEST(a_request_with_max_segments_passes_the_smallest_queue, STRICT)
{
    struct blkio *b = connected();
    const char *property = has_property(b, "queue-size") ? "queue-size" : "num-entries";
    if (!has_property(b, property))
        SKIP("no property for the size of queues");
    blkio_destroy(&b);
    struct device d = open_device_with(property, strcmp(property, "queue-size") == 0 ? 4 : 1);
    int count = get_int(d.b, "max-segments");
    struct iovec *iovec = calloc((size_t)count, sizeof *iovec);
    for (int i = 0; i < count; i++)
        iovec[i] = (struct iovec){d.buf + (size_t)i * d.unit % REGION_LEN, d.unit};
    blkioq_readv(d.q, 0, iovec, count, &d, 0);
    CHECK_EQ(reap_ret(d.q, &d), 0);
    free(iovec);
    close_device(&d);
}

/* Threads */

struct thread_work {
    struct device *d;
    struct blkioq *q;
    int index;
};

static void *write_and_read(void *argument)
{
    struct thread_work *work = argument;
    struct device d = *work->d;
    d.q = work->q;
    char *buf = d.buf + work->index * 128 * KIB;
    for (int i = 0; i < 200; i++) {
        uint64_t start = (uint64_t)work->index * MIB / 2 + (uint64_t)(i % 32) * 4096;
        uint64_t seed = (uint64_t)(work->index * 1000 + i);
        fill(buf, 4096, seed);
        CHECK_EQ(do_write(&d, start, buf, 4096), 0);
        memset(buf, 0, 4096);
        CHECK_EQ(do_read(&d, start, buf, 4096), 0);
        CHECK_EQ(first_difference(buf, 4096, seed), -1);
    }
    return NULL;
}

TEST(each_thread_has_its_queue, WRITES)
{
    int count = queues_possible(4);
    struct blkio *b = started_with(options.poll ? 0 : count, options.poll ? count : 0);
    struct device d = {.b = b, .unit = 4096};
    struct thread_work work[4];
    pthread_t threads[4];
    map_region(&d);
    for (int i = 0; i < count; i++) {
        work[i] = (struct thread_work){&d, options.poll ? blkio_get_poll_queue(b, i) : blkio_get_queue(b, i), i};
        CHECK_EQ(pthread_create(&threads[i], NULL, write_and_read, &work[i]), 0);
    }
    for (int i = 0; i < count; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    blkio_destroy(&b);
}

/* One thread at a time, but another one for each step. */
TEST(a_queue_is_handed_from_thread_to_thread, WRITES)
{
    struct device d = open_device();
    for (int i = 0; i < 8; i++) {
        struct thread_work work = {&d, d.q, i % 4};
        pthread_t thread;
        CHECK_EQ(pthread_create(&thread, NULL, write_and_read, &work), 0);
        CHECK_EQ(pthread_join(thread, NULL), 0);
    }
    write_and_read(&(struct thread_work){&d, d.q, 0});
    close_device(&d);
}

static void *destroy_elsewhere(void *argument)
{
    close_device(argument);
    return NULL;
}

TEST(an_instance_is_destroyed_by_another_thread, 0)
{
    struct device d = open_device();
    pthread_t thread;
    for (int i = 0; i < 16; i++)
        blkioq_read(d.q, 0, d.buf, d.unit, &d, 0);
    for (int i = 0; i < 16; i++)
        CHECK_EQ(reap_ret(d.q, &d), 0);
    CHECK_EQ(pthread_create(&thread, NULL, destroy_elsewhere, &d), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
}

/* Poll queues */

TEST(poll_queues_that_are_not_supported_fail_at_start, 0)
{
    struct blkio *b = connected();
    if (get_bool(b, "supports-poll-queues"))
        SKIP("supports-poll-queues is true");
    CHECK_RET(blkio_set_int(b, "num-poll-queues", 1), 0);
    CHECK_FAILS(blkio_start(b));
    CHECK_RET(blkio_set_int(b, "num-poll-queues", 0), 0);
    CHECK_RET(blkio_start(b), 0);
    CHECK_FAILS(blkio_add_poll_queue(b));
    blkio_destroy(&b);
}

TEST(a_poll_queue_has_no_completion_fd, POLLED)
{
    need_poll_queues();
    struct blkio *b = started_with(0, 1);
    struct device d = {.b = b, .unit = 4096};
    map_region(&d);
    struct blkioq *q = blkio_get_poll_queue(b, 0);
    CHECK_EQ(blkioq_get_completion_fd(q), -1);
    blkioq_set_completion_fd_enabled(q, true);
    CHECK_EQ(blkioq_get_completion_fd(q), -1);
    read_on(q, &d);
    blkioq_set_completion_fd_enabled(q, false);
    read_on(q, &d);
    CHECK(blkio_get_queue(b, 0) == NULL);
    CHECK(blkio_get_poll_queue(b, 1) == NULL);
    blkio_destroy(&b);
}

TEST(do_io_interruptible_is_enotsup_on_a_poll_queue, POLLED)
{
    need_poll_queues();
    struct blkio *b = started_with(0, 1);
    struct device d = {.b = b, .unit = 4096};
    struct blkio_completion c;
    sigset_t mask;
    sigemptyset(&mask);
    map_region(&d);
    struct blkioq *q = blkio_get_poll_queue(b, 0);
    blkioq_read(q, 0, d.buf, d.unit, &d, 0);
    CHECK_RET(blkioq_do_io_interruptible(q, &c, 1, 1, NULL, &mask), -ENOTSUP);
    CHECK_EQ(reap_ret(q, &d), 0);
    blkio_destroy(&b);
}

TEST(both_kinds_of_queues_live_side_by_side, POLLED)
{
    need_poll_queues();
    if (queues_possible(4) < 4)
        SKIP("max-queues is below 4");
    struct blkio *b = started_with(2, 2);
    struct device d = {.b = b, .unit = 4096};
    map_region(&d);
    for (int i = 0; i < 2; i++) {
        CHECK(blkio_get_queue(b, i) != blkio_get_poll_queue(b, i));
        read_on(blkio_get_queue(b, i), &d);
        read_on(blkio_get_poll_queue(b, i), &d);
    }
    CHECK_RET(blkio_remove_queue(b, 0), 0);
    read_on(blkio_get_poll_queue(b, 0), &d);
    CHECK_RET(blkio_remove_poll_queue(b, 0), 0);
    CHECK_RET(blkio_remove_poll_queue(b, 0), -ENOENT);
    CHECK(blkio_get_poll_queue(b, 0) == NULL);
    read_on(blkio_get_poll_queue(b, 1), &d);
    read_on(blkio_get_queue(b, 1), &d);
    blkio_destroy(&b);
}

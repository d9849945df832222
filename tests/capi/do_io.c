/* blkioq_do_io(): how many completions, how long, interrupted by what. */
#define _GNU_SOURCE
#include "device.h"
#include "harness.h"

#include <signal.h>
#include <unistd.h>

static void read_some(struct device *d, int count)
{
    for (int i = 0; i < count; i++)
        blkioq_read(d->q, 0, d->buf + (size_t)i * d->unit, d->unit, (void *)(uintptr_t)i, 0);
}

/* A read that is not done until the server continues. */
static void read_held(struct device *d)
{
    stop_process(options.server);
    blkioq_read(d->q, 0, d->buf, 4096, d, 0);
}

static void release(void)
{
    let_continue(options.server);
}

/* What tests wait for while a read is held, and how long a read is held that they wait for. */
static const double wait_s = 0.1;

static struct timespec timeout_of(double s)
{
    return (struct timespec){(time_t)s, (long)((s - (double)(time_t)s) * 1e9)};
}

static double seconds_of(struct timespec t)
{
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

TEST(nothing_outstanding_is_no_completion, 0)
{
    struct device d = open_device();
    struct blkio_completion c[4];
    CHECK_RET(blkioq_do_io(d.q, c, 0, 4, NULL), 0);
    CHECK_RET(blkioq_do_io(d.q, NULL, 0, 0, NULL), 0);
    CHECK_RET(blkioq_do_io(d.q, c, 0, 0, NULL), 0);
    close_device(&d);
}

TEST(impossible_numbers_of_completions_are_einval_and_lose_nothing, 0)
{
    struct device d = open_device();
    struct blkio_completion c[8];
    CHECK_RET(blkioq_do_io(d.q, c, 1, 1, NULL), -EINVAL);
    read_some(&d, 2);
    CHECK_RET(blkioq_do_io(d.q, c, 3, 8, NULL), -EINVAL);
    CHECK_RET(blkioq_do_io(d.q, c, 2, 1, NULL), -EINVAL);
    CHECK_RET(blkioq_do_io(d.q, c, -1, 1, NULL), -EINVAL);
    CHECK_RET(blkioq_do_io(d.q, c, 0, -1, NULL), -EINVAL);
    CHECK_RET(blkioq_do_io(d.q, NULL, 0, 1, NULL), -EINVAL);
    CHECK_RET(blkioq_do_io(d.q, NULL, 1, 1, NULL), -EINVAL);
    CHECK_RET(blkioq_do_io(d.q, c, 2, 8, NULL), 2);
    CHECK_RET(blkioq_do_io(d.q, c, 1, 8, NULL), -EINVAL);
    close_device(&d);
}

TEST(completed_requests_count_as_outstanding_until_returned, 0)
{
    struct device d = open_device();
    struct blkio_completion c[8];
    blkioq_read(d.q, 0, d.buf, d.unit, NULL, 1u << 31); /* fails at once */
    read_some(&d, 3);
    CHECK_RET(blkioq_do_io(d.q, NULL, 0, 0, NULL), 0);
    usleep(20000);
    CHECK_RET(blkioq_do_io(d.q, c, 5, 8, NULL), -EINVAL);
    CHECK_RET(blkioq_do_io(d.q, c, 4, 8, NULL), 4);
    close_device(&d);
}

TEST(min_completions_are_waited_for_and_max_completions_are_not_exceeded, 0)
{
    struct device d = open_device();
    struct blkio_completion c[32];
    bool seen[24] = {false};
    int done = 0;
    read_some(&d, 24);
    while (done < 24) {
        int min = 24 - done < 4 ? 24 - done : 4;
        memset(c, 0x5a, sizeof c);
        int n = blkioq_do_io(d.q, c, min, 7, NULL);
        CHECK(n >= min && n <= 7);
        for (int i = 0; i < n; i++) {
            CHECK_EQ(c[i].ret, 0);
            uintptr_t which = (uintptr_t)c[i].user_data;
            CHECK(which < 24 && !seen[which]);
            seen[which] = true;
        }
        CHECK_EQ(((unsigned char *)&c[n])[0], 0x5a); /* untouched */
        done += n;
    }
    CHECK_RET(blkioq_do_io(d.q, c, 0, 32, NULL), 0);
    read_some(&d, 24);
    CHECK_RET(blkioq_do_io(d.q, c, 24, 24, NULL), 24);
    close_device(&d);
}

TEST(min_0_submits_and_does_not_wait, SERVER)
{
    struct device d = open_device();
    struct blkio_completion c;
    read_held(&d);
    CHECK_RET(blkioq_do_io(d.q, NULL, 0, 0, NULL), 0);
    CHECK_RET(blkioq_do_io(d.q, &c, 0, 1, NULL), 0);
    release();
    CHECK_EQ(reap_ret(d.q, &d), 0);
    close_device(&d);
}

TEST(polling_by_the_application_sees_the_completion, 0)
{
    struct device d = open_device();
    struct blkio_completion c;
    int ret;
    double end = seconds() + 60;
    read_some(&d, 1);
    do
        ret = blkioq_do_io(d.q, &c, 0, 1, NULL);
    while (ret == 0 && seconds() < end);
    CHECK_RET(ret, 1);
    CHECK_EQ(c.ret, 0);
    close_device(&d);
}

/* Timeouts */

TEST(an_impossible_timeout_is_einval_and_left_alone, 0)
{
    struct device d = open_device();
    struct blkio_completion c;
    static const struct timespec wrong[] = {{-1, 0}, {0, -1}, {0, 1000000000}, {1, 2000000000}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct timespec timeout = wrong[i];
        CHECK_RET(blkioq_do_io(d.q, &c, 0, 1, &timeout), -EINVAL);
        CHECK_EQ(timeout.tv_sec, wrong[i].tv_sec);
        CHECK_EQ(timeout.tv_nsec, wrong[i].tv_nsec);
    }
    close_device(&d);
}

TEST(a_timeout_that_expires_is_etime_and_leaves_nothing_of_it, SERVER)
{
    struct device d = open_device();
    struct blkio_completion c;
    struct timespec timeout = timeout_of(wait_s);
    read_held(&d);
    double start = seconds();
    CHECK_RET(blkioq_do_io(d.q, &c, 1, 1, &timeout), -ETIME);
    CHECK(seconds() - start >= wait_s * 0.9);
    CHECK(seconds_of(timeout) < wait_s / 10);
    release();
    CHECK_EQ(reap_ret(d.q, &d), 0); /* not lost */
    close_device(&d);
}

TEST(a_timeout_of_zero_expires_at_once, SERVER)
{
    struct device d = open_device();
    struct blkio_completion c;
    struct timespec timeout = {0, 0};
    read_held(&d);
    CHECK_RET(blkioq_do_io(d.q, &c, 0, 1, &timeout), 0);
    CHECK_RET(blkioq_do_io(d.q, &c, 1, 1, &timeout), -ETIME);
    release();
    CHECK_EQ(reap_ret(d.q, &d), 0);
    close_device(&d);
}

TEST(elapsed_time_is_taken_off_the_timeout_on_success, SERVER)
{
    struct device d = open_device();
    struct blkio_completion c;
    struct timespec timeout = {10000, 0};
    read_held(&d);
    CHECK_RET(blkioq_do_io(d.q, NULL, 0, 0, NULL), 0);
    double start = seconds();
    let_continue_after(options.server, wait_s);
    CHECK_RET(blkioq_do_io(d.q, &c, 1, 1, &timeout), 1);
    double taken_off = 10000 - seconds_of(timeout);
    CHECK(taken_off > 0 && taken_off < seconds() - start + wait_s);
    close_device(&d);
}

/* A read that is done by now, and is not taken, then one that is held. */
static void read_before_the_held(struct device *d, void *user_data)
{
    blkioq_read(d->q, 4 * KIB, d->buf + 8192, d->unit, user_data, 0);
    CHECK_RET(blkioq_do_io(d->q, NULL, 0, 0, NULL), 0);
    usleep(20000);
    read_held(d);
}

/* The held read and the other, each once. */
static void reap_both(struct device *d, void *other)
{
    struct blkio_completion first = reap(d->q), second = reap(d->q);
    CHECK_EQ(first.ret, 0);
    CHECK_EQ(second.ret, 0);
    CHECK((first.user_data == other && second.user_data == d) || (first.user_data == d && second.user_data == other));
}

TEST(requests_that_completed_before_etime_are_not_lost, SERVER)
{
    struct device d = open_device();
    struct blkio_completion c[4];
    struct timespec timeout = timeout_of(wait_s);
    read_before_the_held(&d, &timeout);
    CHECK_RET(blkioq_do_io(d.q, c, 2, 4, &timeout), -ETIME);
    release();
    reap_both(&d, &timeout);
    close_device(&d);
}

TEST(a_long_timeout_does_not_overflow, 0)
{
    struct device d = open_device();
    struct blkio_completion c;
    struct timespec timeout = {(time_t)1 << 40, 999999999};
    read_some(&d, 1);
    CHECK_RET(blkioq_do_io(d.q, &c, 1, 1, &timeout), 1);
    CHECK(timeout.tv_sec >= ((time_t)1 << 40) - 1000);
    close_device(&d);
}

/* Signals */

static volatile sig_atomic_t signals_seen;

static void count_signal(int signal)
{
    (void)signal;
    signals_seen++;
}

/* Blocks SIGUSR1 with a handler in place; *open is a mask that lets it in. */
static void prepare_signal(sigset_t *open)
{
    struct sigaction action = {.sa_handler = count_signal};
    sigset_t blocked;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR1);
    CHECK_EQ(sigaction(SIGUSR1, &action, NULL), 0);
    CHECK_EQ(sigprocmask(SIG_BLOCK, &blocked, open), 0);
    sigdelset(open, SIGUSR1);
}

static void signal_after(double s)
{
    timer_t timer;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
    struct itimerspec when = {.it_value = timeout_of(s)};
    CHECK_EQ(timer_create(CLOCK_MONOTONIC, &event, &timer), 0);
    CHECK_EQ(timer_settime(timer, 0, &when, NULL), 0);
}

/* libblkio 1.5.0's io_uring driver answers -EINVAL to any mask once it has to wait. */
static void need_working_masks(void)
{
    if (strcmp(options.driver, "io_uring") == 0 && !options.freestone)
        SKIP("not demanded of libblkio 1.5.0");
}

TEST(a_signal_interrupts_do_io_interruptible, SERVER | REGULAR)
{
    need_working_masks();
    struct device d = open_device();
    struct blkio_completion c;
    sigset_t open, after;
    prepare_signal(&open);
    read_held(&d);
    signal_after(wait_s);
    CHECK_RET(blkioq_do_io_interruptible(d.q, &c, 1, 1, NULL, &open), -EINTR);
    release();
    CHECK_EQ(signals_seen, 1);
    CHECK_EQ(sigprocmask(SIG_BLOCK, NULL, &after), 0);
    CHECK(sigismember(&after, SIGUSR1)); /* the mask is as before */
    CHECK_EQ(reap_ret(d.q, &d), 0); /* the request is not lost */
    close_device(&d);
}

TEST(a_signal_that_is_pending_interrupts_at_once, SERVER | REGULAR)
{
    need_working_masks();
    struct device d = open_device();
    struct blkio_completion c;
    struct timespec timeout = {1000, 0};
    sigset_t open;
    prepare_signal(&open);
    read_held(&d);
    raise(SIGUSR1);
    CHECK_EQ(signals_seen, 0);
    CHECK_RET(blkioq_do_io_interruptible(d.q, &c, 1, 1, &timeout, &open), -EINTR);
    release();
    CHECK_EQ(signals_seen, 1);
    CHECK_EQ(reap_ret(d.q, &d), 0);
    close_device(&d);
}

TEST(a_signal_that_the_mask_blocks_does_not_interrupt, SERVER | REGULAR)
{
    need_working_masks();
    struct device d = open_device();
    struct blkio_completion c;
    sigset_t open, closed;
    prepare_signal(&open);
    CHECK_EQ(sigprocmask(SIG_BLOCK, NULL, &closed), 0);
    read_held(&d);
    raise(SIGUSR1);
    let_continue_after(options.server, wait_s);
    CHECK_RET(blkioq_do_io_interruptible(d.q, &c, 1, 1, NULL, &closed), 1);
    CHECK_EQ(signals_seen, 0);
    close_device(&d);
}

TEST(a_signal_does_not_interrupt_do_io, SERVER)
{
    struct device d = open_device();
    struct blkio_completion c;
    sigset_t open;
    prepare_signal(&open);
    CHECK_EQ(sigprocmask(SIG_SETMASK, &open, NULL), 0);
    read_held(&d);
    signal_after(wait_s);
    let_continue_after(options.server, 3 * wait_s);
    CHECK_RET(blkioq_do_io(d.q, &c, 1, 1, NULL), 1);
    while (signals_seen == 0) /* late, on a busy machine */
        usleep(1000);
    CHECK_EQ(c.ret, 0);
    CHECK_EQ(signals_seen, 1);
    close_device(&d);
}

TEST(do_io_interruptible_does_what_do_io_does, REGULAR)
{
    need_working_masks();
    struct device d = open_device();
    struct blkio_completion c[8];
    sigset_t open;
    prepare_signal(&open);
    read_some(&d, 4);
    CHECK_RET(blkioq_do_io_interruptible(d.q, c, 3, 2, NULL, &open), -EINVAL);
    CHECK_RET(blkioq_do_io_interruptible(d.q, c, 5, 5, NULL, &open), -EINVAL);
    CHECK_RET(blkioq_do_io_interruptible(d.q, c, 2, 2, NULL, &open), 2);
    CHECK_RET(blkioq_do_io_interruptible(d.q, c, 2, 4, NULL, NULL), 2);
    close_device(&d);
}

TEST(do_io_interruptible_takes_a_timeout_and_a_mask, REGULAR | STRICT)
{
    struct device d = open_device();
    struct blkio_completion c[4];
    struct timespec timeout = {10000, 0};
    sigset_t open;
    prepare_signal(&open);
    read_some(&d, 4);
    CHECK_RET(blkioq_do_io_interruptible(d.q, c, 4, 4, &timeout, &open), 4);
    CHECK(timeout.tv_sec < 10000 && timeout.tv_sec > 9000);
    close_device(&d);
}

TEST(do_io_interruptible_times_out, SERVER | REGULAR | STRICT)
{
    struct device d = open_device();
    struct blkio_completion c;
    struct timespec timeout = timeout_of(wait_s);
    sigset_t open;
    prepare_signal(&open);
    read_held(&d);
    CHECK_RET(blkioq_do_io_interruptible(d.q, &c, 1, 1, &timeout, &open), -ETIME);
    CHECK(seconds_of(timeout) < wait_s / 10);
    release();
    CHECK_EQ(reap_ret(d.q, &d), 0);
    close_device(&d);
}

TEST(requests_that_completed_before_eintr_are_not_lost, SERVER | REGULAR)
{
    need_working_masks();
    struct device d = open_device();
    struct blkio_completion c[4];
    sigset_t open;
    prepare_signal(&open);
    read_before_the_held(&d, &open);
    signal_after(wait_s);
    CHECK_RET(blkioq_do_io_interruptible(d.q, c, 2, 4, NULL, &open), -EINTR);
    release();
    reap_both(&d, &open);
    close_device(&d);
}

/*
 * The harness: tests are functions named by a sentence. Each runs in its own process with a time limit, so that a
 * crash or a hang is one failure. Output is TAP; the exit code is 0 when no test failed.
 */
#ifndef HARNESS_H
#define HARNESS_H

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What a test needs; it is skipped where that is not given. */
enum {
    WRITES = 1 << 0, /* --scratch: the device's content may be changed */
    SERVER = 1 << 1, /* --server PID */
    STRICT = 1 << 2, /* --freestone: the page says so, but libblkio 1.5.0 does otherwise; or the page is silent */
    REGULAR = 1 << 3, /* a regular queue: not with --poll */
    POLLED = 1 << 4, /* poll queues, with or without --poll */
    PEER = 1 << 5,   /* --peer COMMAND */
    FILES = 1 << 6,  /* the io_uring driver: files of this host */
    ZONED = 1 << 7,  /* writes as a zoned device wants it; other tests that write do not run on one */
};

struct test {
    const char *name, *file;
    int needs;
    void (*run)(void);
    struct test *next;
};

void register_test(struct test *test);

/* What the test of this process needs. */
extern int needs_of_test;

#define TEST(sentence, needs_)                                                              \
    static void sentence(void);                                                             \
    static struct test test_##sentence = {#sentence, __FILE__, (needs_), sentence, NULL};   \
    __attribute__((constructor)) static void register_##sentence(void)                      \
    {                                                                                       \
        register_test(&test_##sentence);                                                    \
    }                                                                                       \
    static void sentence(void)

/* End the test of this process: with a failure, or as not applicable here. */
__attribute__((noreturn, format(printf, 3, 4))) void fail_test(const char *file, int line, const char *format, ...);
__attribute__((noreturn, format(printf, 1, 2))) void skip_test(const char *format, ...);

/* What a result is in words: "-22 (EINVAL)". The text is of this thread and holds until the fourth next call. */
const char *words(long long value);

#define FAIL(...) fail_test(__FILE__, __LINE__, __VA_ARGS__)
#define SKIP(...) skip_test(__VA_ARGS__)

#define CHECK(condition)                        \
    do {                                        \
        if (!(condition))                       \
            FAIL("is not so: %s", #condition);  \
    } while (0)

/* For values that are compared as signed 64-bit numbers. */
#define CHECK_EQ(actual, expected)                                                              \
    do {                                                                                        \
        long long a_ = (long long)(actual), e_ = (long long)(expected);                         \
        if (a_ != e_)                                                                           \
            FAIL("%s is %s, expected %s", #actual, words(a_), words(e_));                       \
    } while (0)

/* For calls into the library: shows the message that they leave. */
#define CHECK_RET(call, expected)                                                               \
    do {                                                                                        \
        long long a_ = (long long)(call), e_ = (long long)(expected);                           \
        if (a_ != e_)                                                                           \
            FAIL("%s returned %s, expected %s; message: %s", #call, words(a_), words(e_),       \
                 blkio_get_error_msg());                                                        \
    } while (0)

#define CHECK_FAILS(call)                                                                       \
    do {                                                                                        \
        long long a_ = (long long)(call);                                                       \
        if (a_ >= 0)                                                                            \
            FAIL("%s returned %s, expected an error", #call, words(a_));                        \
        if (!*blkio_get_error_msg())                                                            \
            FAIL("%s returned %s without a message", #call, words(a_));                         \
    } while (0)

#endif

/* Runs the tests: one process each. */
#define _GNU_SOURCE
#include "harness.h"
#include "device.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { EXIT_SKIPPED = 77, DETAIL_LEN = 4096 };

static struct test *first_test, **end_of_tests = &first_test;
int needs_of_test;
static int report_fd = -1; /* where a test's process says why it failed or does not apply */

void register_test(struct test *test)
{
    *end_of_tests = test;
    end_of_tests = &test->next;
}

static void report(const char *format, va_list arguments)
{
    char text[DETAIL_LEN];
    int len = vsnprintf(text, sizeof text, format, arguments);
    if (len >= DETAIL_LEN)
        len = DETAIL_LEN - 1;
    if (write(report_fd, text, (size_t)len) < 0)
        perror("report");
}

void fail_test(const char *file, int line, const char *format, ...)
{
    va_list arguments;
    const char *base = strrchr(file, '/');
    dprintf(report_fd, "%s:%d: ", base ? base + 1 : file, line);
    va_start(arguments, format);
    report(format, arguments);
    va_end(arguments);
    _exit(1);
}

void skip_test(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    report(format, arguments);
    va_end(arguments);
    _exit(EXIT_SKIPPED);
}

const char *words(long long value)
{
    static __thread char texts[4][64];
    static __thread unsigned next;
    char *text = texts[next++ % 4];
    const char *name = value < 0 && value > -4096 ? strerrorname_np((int)-value) : NULL;
    snprintf(text, sizeof texts[0], name ? "%lld (%s)" : "%lld", value, name);
    return text;
}

/* The reason why the command line does not allow a test, or NULL. */
static const char *refused(const struct test *test)
{
    if (test->needs & WRITES && !options.scratch)
        return "writes: give --scratch";
    if (test->needs & SERVER && !options.server)
        return "stops the device's server: give --server PID";
    if (test->needs & STRICT && !options.freestone)
        return "not demanded of libblkio 1.5.0";
    if (test->needs & REGULAR && options.poll)
        return "for regular queues";
    if (test->needs & PEER && !options.peer)
        return "needs a server: give --peer COMMAND";
    if (test->needs & FILES && strcmp(options.driver, "io_uring") != 0)
        return "for the io_uring driver";
    return NULL;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Reads what the process reports until it has ended or time is over; returns its wait status, or -1 for too late. */
static int await_test(pid_t pid, int fd, char *detail)
{
    double end = now() + options.timeout_s;
    size_t len = 0;
    int status;
    while (waitpid(pid, &status, WNOHANG) == 0) {
        struct pollfd readable = {fd, POLLIN, 0};
        if (now() > end) {
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            return -1;
        }
        if (poll(&readable, 1, 10) == 1) {
            ssize_t n = read(fd, detail + len, DETAIL_LEN - 1 - len);
            if (n > 0)
                len += (size_t)n;
            else
                usleep(1000);
        }
    }
    ssize_t n = read(fd, detail + len, DETAIL_LEN - 1 - len);
    detail[len + (size_t)(n > 0 ? n : 0)] = 0;
    return status;
}

enum outcome { PASSED, FAILED, SKIPPED };

static enum outcome run_in_process(const struct test *test, char *detail)
{
    int fds[2];
    if (pipe2(fds, O_CLOEXEC) < 0) {
        perror("pipe2");
        exit(2);
    }
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        close(fds[0]);
        report_fd = fds[1];
        needs_of_test = test->needs;
        test->run();
        exit(0); /* not _exit: a leak checker looks now */
    }
    close(fds[1]);
    fcntl(fds[0], F_SETFL, O_NONBLOCK);
    memset(detail, 0, DETAIL_LEN);
    int status = await_test(pid, fds[0], detail);
    close(fds[0]);
    if (test->needs & SERVER)
        kill(options.server, SIGCONT);
    if (status == -1) {
        snprintf(detail, DETAIL_LEN, "hangs: not done after %d s", options.timeout_s);
        return FAILED;
    }
    if (WIFSIGNALED(status)) {
        snprintf(detail, DETAIL_LEN, "killed by signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
        return FAILED;
    }
    if (WEXITSTATUS(status) == EXIT_SKIPPED)
        return SKIPPED;
    if (WEXITSTATUS(status) != 0 && !*detail)
        snprintf(detail, DETAIL_LEN, "exit code %d; see standard error", WEXITSTATUS(status));
    return WEXITSTATUS(status) == 0 ? PASSED : FAILED;
}

int main(int argc, char **argv)
{
    int count = 0, numbers[3] = {0};
    char detail[DETAIL_LEN];
    parse_options(argc, argv);
    for (struct test *test = first_test; test; test = test->next)
        count += !options.only || strstr(test->name, options.only);
    printf("TAP version 13\n1..%d\n", count);
    int number = 0;
    for (struct test *test = first_test; test; test = test->next) {
        if (options.only && !strstr(test->name, options.only))
            continue;
        const char *reason = refused(test);
        double start = now();
        enum outcome outcome = SKIPPED;
        if (reason)
            snprintf(detail, sizeof detail, "%s", reason);
        else
            outcome = run_in_process(test, detail);
        numbers[outcome]++;
        printf("%sok %d - %s%s%s\n", outcome == FAILED ? "not " : "", ++number, test->name,
               outcome == SKIPPED ? " # SKIP " : "", outcome == SKIPPED ? detail : "");
        if (outcome == FAILED)
            printf("# %s\n", detail);
        if (options.verbose)
            printf("# %.3f s\n", now() - start);
        fflush(stdout);
    }
    printf("# %s: %d passed, %d failed, %d skipped\n", options.driver, numbers[PASSED], numbers[FAILED],
           numbers[SKIPPED]);
    return numbers[FAILED] != 0;
}

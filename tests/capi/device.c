/* The device under test: command line, opening, single requests. */
#define _GNU_SOURCE
#include "device.h"
#include "harness.h"

#include <dirent.h>
#include <getopt.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

struct options options = {.timeout_s = 120};

static const char usage[] =
    "capi-suite --driver NAME --set PROPERTY=VALUE ...: tests of libblkio's C API on a device of 4 MiB or more\n"
    "  --scratch             tests may write to the device\n"
    "  --capacity BYTES      what \"capacity\" must say\n"
    "  --poll                use poll queues wherever either kind will do\n"
    "  --server PID          process that serves the device; tests stop it to hold requests\n"
    "  --peer COMMAND        shell command of a server to kill; {} stands for the path of its socket\n"
    "  --freestone           demand what libblkio 1.5.0 does not keep, and Freestone's extensions\n"
    "  --only TEXT           only tests with TEXT in their name\n"
    "  --timeout SECONDS     limit for each test [120]\n"
    "  --verbose             say how long each test took\n";

static void refuse(const char *what, const char *value)
{
    fprintf(stderr, "capi-suite: %s: %s\n%s", what, value, usage);
    exit(2);
}

static void add_setting(char *text)
{
    char *equals = strchr(text, '=');
    if (!equals)
        refuse("not PROPERTY=VALUE", text);
    if (options.num_settings == MOST_SETTINGS)
        refuse("too many settings", text);
    *equals = 0;
    options.settings[options.num_settings].name = text;
    options.settings[options.num_settings++].value = equals + 1;
}

void parse_options(int argc, char **argv)
{
    static const struct option known[] = {
        {"driver", required_argument, NULL, 'd'}, {"set", required_argument, NULL, 's'},
        {"capacity", required_argument, NULL, 'c'}, {"server", required_argument, NULL, 'S'},
        {"peer", required_argument, NULL, 'P'}, {"only", required_argument, NULL, 'o'},
        {"timeout", required_argument, NULL, 't'}, {"scratch", no_argument, NULL, 'x'},
        {"poll", no_argument, NULL, 'p'}, {"freestone", no_argument, NULL, 'f'},
        {"verbose", no_argument, NULL, 'v'}, {"help", no_argument, NULL, 'h'}, {0},
    };
    int option;
    while ((option = getopt_long(argc, argv, "", known, NULL)) != -1) {
        switch (option) {
        case 'd': options.driver = optarg; break;
        case 's': add_setting(optarg); break;
        case 'c': options.capacity = strtoull(optarg, NULL, 10); break;
        case 'P': options.peer = optarg; break;
        case 'o': options.only = optarg; break;
        case 't': options.timeout_s = atoi(optarg); break;
        case 'x': options.scratch = true; break;
        case 'p': options.poll = true; break;
        case 'f': options.freestone = true; break;
        case 'v': options.verbose = true; break;
        case 'h': fputs(usage, stdout); exit(0);
        case 'S':
            options.server = (pid_t)atoi(optarg);
            if (options.server < 2 || kill(options.server, 0) < 0)
                refuse("no process", optarg);
            break;
        default: exit(2);
        }
    }
    if (optind < argc)
        refuse("unexpected", argv[optind]);
    if (!options.driver)
        refuse("missing", "--driver");
}

const char *setting(const char *name)
{
    for (int i = 0; i < options.num_settings; i++)
        if (strcmp(options.settings[i].name, name) == 0)
            return options.settings[i].value;
    return NULL;
}

bool has_path(void)
{
    return setting("path") && strcmp(options.driver, "freestone") != 0;
}

struct blkio *created(void)
{
    struct blkio *b = NULL;
    CHECK_RET(blkio_create(options.driver, &b), 0);
    CHECK(b != NULL);
    for (int i = 0; i < options.num_settings; i++)
        CHECK_RET(blkio_set_str(b, options.settings[i].name, options.settings[i].value), 0);
    return b;
}

/* A file that an earlier test made longer gets its length back. */
static void restore_length(void)
{
    struct stat status;
    const char *path = setting("path");
    if (options.scratch && options.capacity && path && strcmp(options.driver, "io_uring") == 0 &&
        stat(path, &status) == 0 && S_ISREG(status.st_mode) && (uint64_t)status.st_size != options.capacity)
        CHECK_EQ(truncate(path, (off_t)options.capacity), 0);
}

struct blkio *connected(void)
{
    restore_length();
    struct blkio *b = created();
    CHECK_RET(blkio_connect(b), 0);
    return b;
}

static void choose_queues(struct blkio *b)
{
    if (options.poll) {
        CHECK_RET(blkio_set_int(b, "num-queues", 0), 0);
        CHECK_RET(blkio_set_int(b, "num-poll-queues", 1), 0);
    }
}

struct blkio *started(void)
{
    struct blkio *b = connected();
    choose_queues(b);
    CHECK_RET(blkio_start(b), 0);
    return b;
}

void map_region(struct device *d)
{
    if (needs_of_test & WRITES && !(needs_of_test & ZONED) && has_property(d->b, "zoned") && get_int(d->b, "zoned") > 0)
        SKIP("writes anywhere, but the device is zoned");
    CHECK_RET(blkio_alloc_mem_region(d->b, &d->region, REGION_LEN), 0);
    CHECK_RET(blkio_map_mem_region(d->b, &d->region), 0);
    d->buf = d->region.addr;
}

static struct device with_queue(struct blkio *b)
{
    struct device d = {.b = b};
    d.q = options.poll ? blkio_get_poll_queue(b, 0) : blkio_get_queue(b, 0);
    CHECK(d.q != NULL);
    d.capacity = get_uint64(b, "capacity");
    if (d.capacity < LEAST_CAPACITY)
        FAIL("the device has %ju bytes; tests need %d", d.capacity, LEAST_CAPACITY);
    int alignment = get_int(b, "request-alignment");
    d.unit = alignment > 512 ? (uint32_t)alignment : 512;
    map_region(&d);
    return d;
}

struct device open_device(void)
{
    return with_queue(started());
}

struct device open_device_with(const char *property, int value)
{
    struct blkio *b = connected();
    choose_queues(b);
    CHECK_RET(blkio_set_int(b, property, value), 0);
    CHECK_RET(blkio_start(b), 0);
    return with_queue(b);
}

void close_device(struct device *d)
{
    blkio_unmap_mem_region(d->b, &d->region);
    blkio_free_mem_region(d->b, &d->region);
    blkio_destroy(&d->b);
    CHECK(d->b == NULL);
}

int get_int(struct blkio *b, const char *name)
{
    int value;
    int ret = blkio_get_int(b, name, &value);
    if (ret != 0)
        FAIL("blkio_get_int(\"%s\") returned %s; message: %s", name, words(ret), blkio_get_error_msg());
    return value;
}

bool get_bool(struct blkio *b, const char *name)
{
    bool value;
    int ret = blkio_get_bool(b, name, &value);
    if (ret != 0)
        FAIL("blkio_get_bool(\"%s\") returned %s; message: %s", name, words(ret), blkio_get_error_msg());
    return value;
}

uint64_t get_uint64(struct blkio *b, const char *name)
{
    uint64_t value;
    int ret = blkio_get_uint64(b, name, &value);
    if (ret != 0)
        FAIL("blkio_get_uint64(\"%s\") returned %s; message: %s", name, words(ret), blkio_get_error_msg());
    return value;
}

bool has_property(struct blkio *b, const char *name)
{
    char *text;
    int ret = blkio_get_str(b, name, &text);
    if (ret == 0)
        free(text);
    return ret != -ENOENT;
}

bool can_grow(struct device *d)
{
    return get_bool(d->b, "can-grow");
}

struct blkio_completion reap(struct blkioq *q)
{
    struct blkio_completion completion;
    struct timespec limit = {.tv_sec = options.timeout_s / 2};
    memset(&completion, 0x5a, sizeof completion);
    CHECK_RET(blkioq_do_io(q, &completion, 1, 1, &limit), 1);
    if (completion.ret >= 0 && completion.error_msg)
        FAIL("a completion with ret %d has the message %s", completion.ret, completion.error_msg);
    return completion;
}

int reap_ret(struct blkioq *q, void *user_data)
{
    struct blkio_completion completion = reap(q);
    CHECK(completion.user_data == user_data);
    return completion.ret;
}

int do_read(struct device *d, uint64_t start, void *buf, size_t len)
{
    blkioq_read(d->q, start, buf, len, &d->q, 0);
    return reap_ret(d->q, &d->q);
}

int do_write(struct device *d, uint64_t start, const void *buf, size_t len)
{
    blkioq_write(d->q, start, buf, len, &d->q, 0);
    return reap_ret(d->q, &d->q);
}

static unsigned char byte_at(size_t i, uint64_t seed)
{
    uint64_t x = (seed + i / 8) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9u;
    return (unsigned char)(x >> (8 * (i % 8)));
}

void fill(void *buf, size_t len, uint64_t seed)
{
    for (size_t i = 0; i < len; i++)
        ((unsigned char *)buf)[i] = byte_at(i, seed);
}

long first_difference(const void *buf, size_t len, uint64_t seed)
{
    for (size_t i = 0; i < len; i++)
        if (((const unsigned char *)buf)[i] != byte_at(i, seed))
            return (long)i;
    return -1;
}

/* Whether each thread of a process is stopped: the signal reaches some of them later than kill() returns. */
static bool all_stopped(pid_t pid)
{
    char path[320], line[512];
    bool stopped = true;
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *directory = opendir(path);
    CHECK(directory != NULL);
    for (struct dirent *entry; (entry = readdir(directory));) {
        if (entry->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "/proc/%d/task/%s/stat", pid, entry->d_name);
        FILE *file = fopen(path, "re");
        if (!file || !fgets(line, sizeof line, file)) /* the thread has ended */
            line[0] = 0;
        char *name_end = strrchr(line, ')');
        stopped = stopped && (!name_end || name_end[2] == 'T');
        if (file)
            fclose(file);
    }
    closedir(directory);
    return stopped;
}

void stop_process(pid_t pid)
{
    CHECK_EQ(kill(pid, SIGSTOP), 0);
    while (!all_stopped(pid))
        usleep(1000);
}

void let_continue(pid_t pid)
{
    CHECK_EQ(kill(pid, SIGCONT), 0);
}

static struct {
    pid_t pid;
    double s;
} continued_later;

static void *continue_later(void *unused)
{
    usleep((useconds_t)(continued_later.s * 1e6));
    kill(continued_later.pid, SIGCONT);
    return unused;
}

/* Not from a child: the close of its copies of descriptors may ask the server. */
void let_continue_after(pid_t pid, double s)
{
    pthread_t thread;
    sigset_t all, before;
    continued_later.pid = pid;
    continued_later.s = s;
    sigfillset(&all); /* signals are for the test's own thread */
    CHECK_EQ(pthread_sigmask(SIG_BLOCK, &all, &before), 0);
    CHECK_EQ(pthread_create(&thread, NULL, continue_later, NULL), 0);
    CHECK_EQ(pthread_sigmask(SIG_SETMASK, &before, NULL), 0);
    pthread_detach(thread);
}

double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

int count_open_fds(void)
{
    int count = 0;
    DIR *directory = opendir("/proc/self/fd");
    CHECK(directory != NULL);
    while (readdir(directory))
        count++;
    closedir(directory);
    return count;
}

bool open_fds_return_to(int most)
{
    const struct timespec pause = {.tv_nsec = 10 * 1000 * 1000};
    int count = 0;
    for (int waits = options.timeout_s / 2 * 100; waits > 0; waits--) {
        count = count_open_fds();
        if (count <= most)
            return true;
        nanosleep(&pause, NULL);
    }
    printf("# %d descriptors are open, expected %d\n", count, most);
    return false;
}

int count_mappings(void)
{
    int count = 0;
    char line[4096];
    FILE *maps = fopen("/proc/self/maps", "re");
    CHECK(maps != NULL);
    while (fgets(line, sizeof line, maps))
        count += strstr(line, "memfd:") || strstr(line, "io_uring");
    fclose(maps);
    return count;
}

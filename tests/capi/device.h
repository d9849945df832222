/* The device under test, as the command line gives it, and the few steps that most tests share. */
#ifndef DEVICE_H
#define DEVICE_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#include <blkio.h>

enum {
    KIB = 1 << 10,
    MIB = 1 << 20,
    REGION_LEN = 2 * MIB,
    LEAST_CAPACITY = 4 * MIB, /* tests stay below this */
    MOST_SETTINGS = 16,
};

struct options {
    const char *driver;
    struct {
        const char *name, *value;
    } settings[MOST_SETTINGS];
    int num_settings;
    uint64_t capacity; /* 0: whatever it says */
    pid_t server; /* of the device: while it is stopped no request completes */
    const char *peer; /* shell command of a server; {} stands for its socket */
    const char *only;
    int timeout_s;
    bool scratch, poll, freestone, verbose;
};

extern struct options options;

void parse_options(int argc, char **argv);

/* The value of a --set, or NULL. */
const char *setting(const char *name);

/* Whether "path" is of the file system; to the driver freestone it is a description of devices. */
bool has_path(void);

struct device {
    struct blkio *b;
    struct blkioq *q; /* queue 0; poll queue 0 with --poll */
    struct blkio_mem_region region; /* mapped */
    char *buf; /* the region's memory */
    uint64_t capacity;
    uint32_t unit; /* what starts and lengths of requests are a multiple of; at least 512 */
};

/* Each fails the test when it does not succeed. */
struct blkio *created(void);
struct blkio *connected(void);
struct blkio *started(void);
struct device open_device(void);
struct device open_device_with(const char *property, int value);
void map_region(struct device *d);
void close_device(struct device *d);

int get_int(struct blkio *b, const char *name);
bool get_bool(struct blkio *b, const char *name);
uint64_t get_uint64(struct blkio *b, const char *name);
bool has_property(struct blkio *b, const char *name);

/* Whether reads beyond the end are zeroes and writes make the device longer. */
bool can_grow(struct device *d);

/* Waits for one completion, at most some seconds. */
struct blkio_completion reap(struct blkioq *q);
/* The same, and gives its ret; its user_data must be the one given. */
int reap_ret(struct blkioq *q, void *user_data);

/* One request from start to end, with buffers in the device's region unless said otherwise. */
int do_read(struct device *d, uint64_t start, void *buf, size_t len);
int do_write(struct device *d, uint64_t start, const void *buf, size_t len);

/* Fills memory with what follows from the seed, and compares with it: -1, or the first offset that differs. */
void fill(void *buf, size_t len, uint64_t seed);
long first_difference(const void *buf, size_t len, uint64_t seed);

/*
 * A stopped server answers nothing, so a request stays in flight until the server continues, however slow the machine is.
 * The harness lets the device's server continue after each test.
 */
void stop_process(pid_t pid);
void let_continue(pid_t pid);
/* Lets it continue after that time, while the test goes its way. Once in a test. */
void let_continue_after(pid_t pid, double s);

double seconds(void);
int count_open_fds(void);
/* Whether no more than these are open before half the test's time is over: threads of the library close some later. */
bool open_fds_return_to(int most);
int count_mappings(void);

#endif

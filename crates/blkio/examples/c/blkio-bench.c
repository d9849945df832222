/*
 * blkio-bench DEVICE: random reads or writes, one after the other ended, for a time; prints one JSON object. How it
 * waits is the choice: in blkioq_do_io(), for the completion fd, by calling blkioq_do_io() again and again, or in
 * blkioq_do_io() of a poll queue.
 */
#include "common.h"

#include <getopt.h>
#include <inttypes.h>
#include <poll.h>
#include <unistd.h>

enum { MOST_DEPTH = 4096, BUCKETS = 64 * 16 };

enum mode { BLOCKING, EVENT, POLLING, POLL_QUEUE };
static const char *const mode_names[] = {"blocking", "event", "polling", "poll-queue"};

static struct {
    enum mode mode;
    int depth;
    size_t block;
    double runtime_s;
    bool is_write;
} options = {.depth = 1, .block = 4096, .runtime_s = 3};

struct slot {
    char *buf;
    double start;
};

static struct slot slots[MOST_DEPTH];
static uint64_t histogram[BUCKETS]; /* of latency: 16 buckets for each power of two of nanoseconds */
static uint64_t blocks, random_state = 88172645463325252u;

static uint64_t next_random(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static void submit(struct blkioq *q, struct slot *slot)
{
    uint64_t start = next_random() % blocks * options.block;
    slot->start = seconds();
    if (options.is_write)
        blkioq_write(q, start, slot->buf, options.block, slot, 0);
    else
        blkioq_read(q, start, slot->buf, options.block, slot, 0);
}

static int bucket_of(uint64_t ns)
{
    if (ns < 16)
        return (int)ns;
    int power = 63 - __builtin_clzll(ns);
    return (power - 3) * 16 + (int)(ns >> (power - 4) & 15);
}

static double percentile_us(uint64_t count, double fraction)
{
    uint64_t wanted = (uint64_t)((double)count * fraction), seen = 0;
    int bucket = 0;
    while (bucket < BUCKETS - 1 && (seen += histogram[bucket]) <= wanted)
        bucket++;
    double ns = bucket < 16 ? bucket : (double)(16 + bucket % 16) * (double)(1ull << (bucket / 16 - 1));
    return ns / 1e3;
}

static int take(struct blkioq *q, struct blkio_completion *completions)
{
    if (options.mode == BLOCKING || options.mode == POLL_QUEUE)
        return need(blkioq_do_io(q, completions, 1, options.depth, NULL), "blkioq_do_io");
    int n = need(blkioq_do_io(q, completions, 0, options.depth, NULL), "blkioq_do_io");
    if (n == 0 && options.mode == EVENT) {
        char event[8];
        struct pollfd readable = {blkioq_get_completion_fd(q), POLLIN, 0};
        if (poll(&readable, 1, -1) == 1 && read(readable.fd, event, sizeof event) < 0 && errno != EAGAIN)
            die("completion fd: %s", strerror(errno));
    }
    return n;
}

static uint64_t run(struct blkioq *q, double *took)
{
    static struct blkio_completion completions[MOST_DEPTH];
    uint64_t done = 0;
    int outstanding = options.depth;
    double start = seconds(), now = start;
    for (int i = 0; i < options.depth; i++)
        submit(q, &slots[i]);
    while (outstanding > 0) {
        int n = take(q, completions);
        now = seconds();
        for (int i = 0; i < n; i++) {
            struct slot *slot = completions[i].user_data;
            if (completions[i].ret != 0)
                die("a request failed: %s",
                    completions[i].error_msg ? completions[i].error_msg : strerror(-completions[i].ret));
            histogram[bucket_of((uint64_t)((now - slot->start) * 1e9))]++;
            done++;
            if (now - start < options.runtime_s)
                submit(q, slot);
            else
                outstanding--;
        }
    }
    *took = now - start;
    return done;
}

static void print_json(const char *device, uint64_t done, double took)
{
    printf("{\"device\": \"");
    for (const char *c = device; *c; c++)
        printf(*c == '"' || *c == '\\' ? "\\%c" : "%c", *c);
    printf("\", \"op\": \"%s\", \"mode\": \"%s\", \"depth\": %d, \"block\": %zu, \"seconds\": %.3f, ",
           options.is_write ? "write" : "read", mode_names[options.mode], options.depth, options.block, took);
    printf("\"requests\": %" PRIu64 ", \"iops\": %.0f, \"mib_s\": %.1f, ", done, (double)done / took,
           (double)done * (double)options.block / took / (1 << 20));
    printf("\"latency_us\": {\"p50\": %.1f, \"p99\": %.1f, \"p999\": %.1f}}\n", percentile_us(done, 0.5),
           percentile_us(done, 0.99), percentile_us(done, 0.999));
}

static void usage(void)
{
    fprintf(stderr,
            "usage: blkio-bench [options] DEVICE\n"
            "  --mode MODE      blocking, event, polling or poll-queue [blocking]\n"
            "  --depth N        requests in flight, 1 to 4096 [1]\n"
            "  --block SIZE     length of each [4096]\n"
            "  --runtime S      seconds [3]\n"
            "  --write          write instead of read: destroys what is on the device\n" HOW_TO_WRITE_A_DEVICE);
    exit(2);
}

static enum mode parse_mode(const char *text)
{
    for (enum mode mode = BLOCKING; mode <= POLL_QUEUE; mode++)
        if (strcmp(text, mode_names[mode]) == 0)
            return mode;
    usage();
    return BLOCKING;
}

static void parse(int argc, char **argv)
{
    static const struct option known[] = {
        {"mode", required_argument, NULL, 'm'}, {"depth", required_argument, NULL, 'd'},
        {"block", required_argument, NULL, 'b'}, {"runtime", required_argument, NULL, 'r'},
        {"write", no_argument, NULL, 'w'}, {0},
    };
    int option;
    while ((option = getopt_long(argc, argv, "", known, NULL)) != -1) {
        switch (option) {
        case 'm': options.mode = parse_mode(optarg); break;
        case 'd': options.depth = atoi(optarg); break;
        case 'b': options.block = parse_size(optarg); break;
        case 'r': options.runtime_s = atof(optarg); break;
        case 'w': options.is_write = true; break;
        default: usage();
        }
    }
    if (argc - optind != 1 || options.depth < 1 || options.depth > MOST_DEPTH || options.block < 1 ||
        options.block > 1 << 24 || options.runtime_s <= 0)
        usage();
}

int main(int argc, char **argv)
{
    parse(argc, argv);
    const char *device = argv[optind];
    bool polled = options.mode == POLL_QUEUE;
    struct blkio *b = connect_device(device, !options.is_write);
    need(blkio_set_int(b, "num-queues", !polled), "num-queues");
    need(blkio_set_int(b, "num-poll-queues", polled), "num-poll-queues");
    need(blkio_start(b), device);
    if (options.block % (unsigned)int_property(b, "request-alignment"))
        die("--block %zu is no multiple of \"request-alignment\", %d", options.block,
            int_property(b, "request-alignment"));
    blocks = uint64_property(b, "capacity") / options.block;
    if (blocks == 0)
        die("%s: smaller than one block", device);
    struct blkio_mem_region region = map_memory(b, (size_t)options.depth * options.block);
    memset(region.addr, 0x5a, region.len);
    for (int i = 0; i < options.depth; i++)
        slots[i].buf = (char *)region.addr + (size_t)i * options.block;
    struct blkioq *q = polled ? blkio_get_poll_queue(b, 0) : blkio_get_queue(b, 0);
    if (options.mode == EVENT)
        blkioq_set_completion_fd_enabled(q, true);
    double took;
    uint64_t done = run(q, &took);
    print_json(device, done, took);
    blkio_destroy(&b);
    return 0;
}

/*
 * blkio-copy SOURCE DESTINATION: copies a device to another, with any two drivers. Several pieces are under way at
 * once: each is read, and written when it has been read. A piece of zeroes is written as such.
 */
#include "common.h"

#include <getopt.h>
#include <unistd.h>

enum { MOST_DEPTH = 256 };

struct piece {
    char *buf;
    uint64_t start;
    size_t len;
};

struct end {
    struct blkio *b;
    struct blkioq *q;
};

static struct end source, destination;
static struct piece pieces[MOST_DEPTH];
static uint64_t total, next_start, copied;
static uint64_t zeroes_end; /* where the destination ends at first: zeroes beyond it may not make a file longer */
static size_t block = 1 << 20;
static unsigned alignment = 512; /* of both ends */

static struct end start_end(const char *spec, bool read_only)
{
    struct end end = {.b = connect_device(spec, read_only)};
    need(blkio_start(end.b), spec);
    end.q = blkio_get_queue(end.b, 0);
    if (!end.q)
        die("%s: there is no queue", spec);
    return end;
}

/* One memory for both ends: allocated by one, mapped by both. */
static void share_memory(int depth)
{
    uint64_t unit = uint64_property(destination.b, "mem-region-alignment");
    size_t len = (size_t)depth * block;
    len = (len + unit - 1) / unit * unit;
    struct blkio_mem_region region = map_memory(source.b, len);
    need(blkio_map_mem_region(destination.b, &region), "cannot map memory for the destination");
    for (int i = 0; i < depth; i++)
        pieces[i].buf = (char *)region.addr + (size_t)i * block;
}

static bool read_next(struct piece *piece)
{
    if (next_start == total)
        return false;
    piece->start = next_start;
    piece->len = total - next_start < block ? (size_t)(total - next_start) : block;
    next_start += piece->len;
    blkioq_read(source.q, piece->start, piece->buf, piece->len, piece, 0);
    return true;
}

static bool is_zero(const char *buf, size_t len)
{
    return buf[0] == 0 && memcmp(buf, buf + 1, len - 1) == 0;
}

/* A device that has no write zeroes says so in the completion; then it is plain data. */
static void write_piece(struct piece *piece, bool zeroes_work)
{
    if (zeroes_work && piece->start + piece->len <= zeroes_end && is_zero(piece->buf, piece->len))
        blkioq_write_zeroes(destination.q, piece->start, piece->len, piece, BLKIO_REQ_NO_FALLBACK);
    else
        blkioq_write(destination.q, piece->start, piece->buf, piece->len, piece, 0);
}

static int take(struct end *end, struct blkio_completion *completions, int min)
{
    return need(blkioq_do_io(end->q, completions, min, MOST_DEPTH, NULL), "blkioq_do_io");
}

static void fail(const char *what, const struct piece *piece, const struct blkio_completion *c)
{
    die("%s of %zu bytes at %ju: %s", what, piece->len, (uintmax_t)piece->start,
        c->error_msg ? c->error_msg : strerror(-c->ret));
}

static void copy_all(int depth, bool progress)
{
    struct blkio_completion completions[MOST_DEPTH];
    int reading = 0, writing = 0;
    bool zeroes_work = true;
    for (int i = 0; i < depth; i++)
        reading += read_next(&pieces[i]);
    while (reading + writing > 0) {
        /* Never wait for one end while the other has something to do. */
        int n = take(&source, completions, reading > 0 && writing == 0);
        reading -= n;
        for (int i = 0; i < n; i++) {
            if (completions[i].ret != 0)
                fail("read", completions[i].user_data, &completions[i]);
            write_piece(completions[i].user_data, zeroes_work);
            writing++;
        }
        n = take(&destination, completions, writing > 0 && n == 0);
        writing -= n;
        for (int i = 0; i < n; i++) {
            struct piece *piece = completions[i].user_data;
            if (completions[i].ret == -ENOTSUP) {
                zeroes_work = false;
                write_piece(piece, false);
                writing++;
                continue;
            }
            if (completions[i].ret != 0)
                fail("write", piece, &completions[i]);
            copied += piece->len;
            reading += read_next(piece);
        }
        if (progress && n > 0)
            fprintf(stderr, "\r%3u %%", (unsigned)(copied * 100 / total));
    }
    blkioq_flush(destination.q, NULL, 0);
    take(&destination, completions, 1);
    if (completions[0].ret != 0)
        die("flush: %s", strerror(-completions[0].ret));
}

static void usage(void)
{
    fprintf(stderr,
            "usage: blkio-copy [--depth N] [--block SIZE] [--quiet] SOURCE DESTINATION\n"
            "  --depth N     pieces under way at once, 1 to 256 [16]\n"
            "  --block SIZE  length of a piece [1M]\n" HOW_TO_WRITE_A_DEVICE);
    exit(2);
}

int main(int argc, char **argv)
{
    static const struct option known[] = {
        {"depth", required_argument, NULL, 'd'}, {"block", required_argument, NULL, 'b'},
        {"quiet", no_argument, NULL, 'q'}, {0},
    };
    int depth = 16, option;
    bool progress = isatty(STDERR_FILENO);
    while ((option = getopt_long(argc, argv, "", known, NULL)) != -1) {
        switch (option) {
        case 'd': depth = atoi(optarg); break;
        case 'b': block = parse_size(optarg); break;
        case 'q': progress = false; break;
        default: usage();
        }
    }
    if (argc - optind != 2 || depth < 1 || depth > MOST_DEPTH || block < 512 || block > 1 << 26)
        usage();
    source = start_end(argv[optind], true);
    destination = start_end(argv[optind + 1], false);
    total = uint64_property(source.b, "capacity");
    for (int i = 0; i < 2; i++) {
        unsigned other = (unsigned)int_property(i ? destination.b : source.b, "request-alignment");
        alignment = other > alignment ? other : alignment;
    }
    if (block % alignment)
        die("pieces of %zu bytes are no multiple of \"request-alignment\", %u", block, alignment);
    bool can_grow;
    need(blkio_get_bool(destination.b, "can-grow", &can_grow), "can-grow");
    zeroes_end = uint64_property(destination.b, "capacity");
    if (!can_grow && zeroes_end < total)
        die("%s: has %ju bytes, the source has %ju", argv[optind + 1], (uintmax_t)zeroes_end, (uintmax_t)total);
    share_memory(depth);
    double start = seconds();
    copy_all(depth, progress);
    double took = seconds() - start;
    fprintf(stderr, "%s%ju bytes in %.3f s, %.1f MiB/s\n", progress ? "\r" : "", (uintmax_t)copied, took,
            (double)copied / took / (1 << 20));
    blkio_destroy(&destination.b);
    blkio_destroy(&source.b);
    return 0;
}

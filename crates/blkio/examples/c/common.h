/* What the examples share: a device written as DRIVER:PROPERTY=VALUE,..., and giving up with a message. */
#ifndef COMMON_H
#define COMMON_H

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <blkio.h>

#define HOW_TO_WRITE_A_DEVICE                                                           \
    "A device is written DRIVER:PROPERTY=VALUE,...; a comma in a value is doubled.\n"   \
    "    io_uring:path=disk.img,direct=true\n"                                          \
    "    virtio-blk-vhost-user:path=/tmp/disk.sock,queue-size=128\n"

__attribute__((noreturn, format(printf, 1, 2))) static inline void die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(1);
}

/* Gives up when a call of the library has failed. */
static inline int need(int ret, const char *what)
{
    if (ret < 0)
        die("%s: %s (%s)", what, blkio_get_error_msg(), strerror(-ret));
    return ret;
}

/* Cuts the next PROPERTY=VALUE off; undoubles commas. */
static inline char *next_setting(char **rest)
{
    char *start = *rest, *in = start, *out = start;
    if (!start || !*start)
        return NULL;
    while (*in && !(in[0] == ',' && in[1] != ',')) {
        in += in[0] == ',';
        *out++ = *in++;
    }
    *rest = *in ? in + 1 : in;
    *out = 0;
    return start;
}

/*
 * Creates and connects an instance. Properties that wait for the connection (queue-size, ...) are set after it.
 * read_only: for devices that are only read.
 */
static inline struct blkio *connect_device(const char *spec, bool read_only)
{
    enum { MOST = 32 };
    char *text = strdup(spec), *rest = strchr(text, ':'), *later[MOST][2];
    int count = 0;
    struct blkio *b;
    if (rest)
        *rest++ = 0;
    need(blkio_create(text, &b), text);
    if (read_only)
        need(blkio_set_bool(b, "read-only", true), "read-only");
    for (char *setting; (setting = next_setting(&rest));) {
        char *value = strchr(setting, '=');
        if (!value)
            die("%s: \"%s\" is not PROPERTY=VALUE", spec, setting);
        *value++ = 0;
        int ret = blkio_set_str(b, setting, value);
        if (ret == -ENODEV && count < MOST) {
            later[count][0] = setting;
            later[count++][1] = value;
        } else {
            need(ret, setting);
        }
    }
    need(blkio_connect(b), spec);
    for (int i = 0; i < count; i++)
        need(blkio_set_str(b, later[i][0], later[i][1]), later[i][0]);
    free(text);
    return b;
}

static inline int int_property(struct blkio *b, const char *name)
{
    int value;
    need(blkio_get_int(b, name, &value), name);
    return value;
}

static inline uint64_t uint64_property(struct blkio *b, const char *name)
{
    uint64_t value;
    need(blkio_get_uint64(b, name, &value), name);
    return value;
}

/* A mapped region of at least len bytes. */
static inline struct blkio_mem_region map_memory(struct blkio *b, size_t len)
{
    struct blkio_mem_region region;
    size_t alignment = uint64_property(b, "mem-region-alignment");
    len = (len + alignment - 1) / alignment * alignment;
    need(blkio_alloc_mem_region(b, &region, len), "cannot allocate memory");
    need(blkio_map_mem_region(b, &region), "cannot map memory");
    return region;
}

/* Reads a number that may end with K, M, G or T. */
static inline uint64_t parse_size(const char *text)
{
    char *end;
    static const char units[] = "KMGT";
    errno = 0;
    uint64_t value = strtoull(text, &end, 10);
    const char *unit = *end ? strchr(units, *end) : NULL;
    if (errno || end == text || *text == '-' || (*end && (!unit || end[1])))
        die("\"%s\" is no size", text);
    int shift = unit ? 10 * (int)(unit - units + 1) : 0;
    if (value > UINT64_MAX >> shift)
        die("\"%s\" is too large", text);
    return value << shift;
}

static inline double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

#endif

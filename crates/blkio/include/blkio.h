/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Block device I/O: one interface to files, block devices, NVMe namespaces, virtio-blk devices and network disks.
 *
 * The names, values and layouts of the first part are those of libblkio 1.5, so that a program needs neither another
 * source nor another build. The last part, marked by BLKIO_FREESTONE, exists in Freestone's library only.
 *
 * An instance (struct blkio) goes through three states: created, connected, started. Its queues (struct blkioq) take
 * requests and give completions. A function that fails returns a negative errno; blkio_get_error_msg() says why.
 * An instance and each of its queues may be used by one thread at a time. Different queues need no lock between them.
 *
 * blkio(3) describes properties, drivers and errors.
 */
#ifndef BLKIO_H
#define BLKIO_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>
#include <time.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A device and the driver that reaches it. */
struct blkio;

/* A queue of a started instance. It belongs to the instance and ends with it, or with blkio_remove_queue(). */
struct blkioq;

/* Memory that requests may point to. */
struct blkio_mem_region
{
    void *addr;        /* first byte; a multiple of "mem-region-alignment" */
    size_t len;        /* in bytes; a multiple of "mem-region-alignment" */
    uint64_t iova;     /* reserved: 0 */
    int64_t fd_offset; /* where in the file addr lies, in bytes */
    int fd;            /* the file behind the memory; -1 for none, where "needs-mem-region-fd" is false */
    uint32_t flags;    /* reserved: 0 */
};

/* How a request has ended. */
struct blkio_completion
{
    void *user_data;       /* what the request was given */
    const char *error_msg; /* what went wrong, or NULL; lives as long as the instance */
    int ret;               /* 0, or for blkioq_report_zones() the number of zones; a negative errno when it failed */
    uint8_t reserved_[12];
};

/* The message of the last failure in this thread: never NULL, empty before the first one. */
const char *blkio_get_error_msg(void);

/*
 * Instances
 */

/* Makes an instance of a driver in *bp. -ENOENT: no such driver. */
int blkio_create(const char *driver, struct blkio **bp);

/* Reaches the device that the properties name: created -> connected. */
int blkio_connect(struct blkio *b);

/* Makes the queues: connected -> started. */
int blkio_start(struct blkio *b);

/* Ends an instance in any state, with its queues, mappings and memory regions, and sets *bp to NULL. */
void blkio_destroy(struct blkio **bp);

/*
 * Properties. -ENOENT: no such property. -ENOTTY: it has another type. Reading one that this state does not have:
 * -ENODEV. Writing: -EACCES when it is only for reading, -ENODEV before and -EBUSY after the state that allows it,
 * -EINVAL when the value is impossible.
 */

int blkio_get_bool(struct blkio *b, const char *name, bool *value);
int blkio_get_int(struct blkio *b, const char *name, int *value);
int blkio_get_uint64(struct blkio *b, const char *name, uint64_t *value);

/* Gives any property as text. The caller hands *value to free(). */
int blkio_get_str(struct blkio *b, const char *name, char **value);

int blkio_set_bool(struct blkio *b, const char *name, bool value);
int blkio_set_int(struct blkio *b, const char *name, int value);
int blkio_set_uint64(struct blkio *b, const char *name, uint64_t value);

/* Sets any property from text: "true" or "false", a decimal number, or a string. */
int blkio_set_str(struct blkio *b, const char *name, const char *value);

/*
 * Memory regions of a started instance. No request that uses a region may be in flight while it is mapped, unmapped
 * or freed, and regions must not overlap.
 */

/* Allocates len bytes that every driver can use, and describes them in *region. They are not mapped yet. */
int blkio_alloc_mem_region(struct blkio *b, struct blkio_mem_region *region, size_t len);

/* Frees what blkio_alloc_mem_region() gave; it must not be mapped. */
void blkio_free_mem_region(struct blkio *b, const struct blkio_mem_region *region);

/* Lets requests of all queues use the region. The descriptor stays the caller's, who may close it at once. */
int blkio_map_mem_region(struct blkio *b, const struct blkio_mem_region *region);

/* Takes a mapped region back; does nothing for any other. */
void blkio_unmap_mem_region(struct blkio *b, const struct blkio_mem_region *region);

/*
 * Queues. An index stays with its queue until the queue is removed.
 */

/* NULL when there is no such queue. */
struct blkioq *blkio_get_queue(struct blkio *b, int index);
struct blkioq *blkio_get_poll_queue(struct blkio *b, int index);

/* Add a queue to a started instance and return its index. -ENOTSUP where "can-add-queues" is false. */
int blkio_add_queue(struct blkio *b);
int blkio_add_poll_queue(struct blkio *b);

/* Remove a queue; pointers to it are void afterwards. -ENOENT: there is no such queue. */
int blkio_remove_queue(struct blkio *b, int index);
int blkio_remove_poll_queue(struct blkio *b, int index);

/*
 * Requests. They are accepted without limit and end as completions, also when they are wrong. The device may see them
 * at once, and does when blkioq_do_io() is called. Data and iovecs must stay until the completion is returned.
 */

enum {
    /* The data is on stable storage before the request completes: write, writev, write_zeroes. */
    BLKIO_REQ_FUA = 1 << 0,
    /* The space stays allocated: write_zeroes. */
    BLKIO_REQ_NO_UNMAP = 1 << 1,
    /* -ENOTSUP rather than writing a buffer of zeroes: write_zeroes. */
    BLKIO_REQ_NO_FALLBACK = 1 << 2
};

void blkioq_read(struct blkioq *q, uint64_t start, void *buf, size_t len, void *user_data, uint32_t flags);
void blkioq_write(struct blkioq *q, uint64_t start, const void *buf, size_t len, void *user_data, uint32_t flags);
void blkioq_readv(struct blkioq *q, uint64_t start, const struct iovec *iovec, int iovcnt, void *user_data,
                  uint32_t flags);
void blkioq_writev(struct blkioq *q, uint64_t start, struct iovec *iovec, int iovcnt, void *user_data, uint32_t flags);
void blkioq_write_zeroes(struct blkioq *q, uint64_t start, uint64_t len, void *user_data, uint32_t flags);
void blkioq_discard(struct blkioq *q, uint64_t start, uint64_t len, void *user_data, uint32_t flags);
void blkioq_flush(struct blkioq *q, void *user_data, uint32_t flags);

/*
 * Zoned devices. An offset is in bytes from the start of the device and names the zone that it lies in.
 */

enum {
    BLKIO_ZONE_TYPE_CONVENTIONAL = 0x1,
    BLKIO_ZONE_TYPE_SEQWRITE_REQ = 0x2,
    BLKIO_ZONE_TYPE_SEQWRITE_PREF = 0x3
};

enum {
    BLKIO_ZONE_STATE_EMPTY = 0x1,
    BLKIO_ZONE_STATE_IMP_OPEN = 0x2,
    BLKIO_ZONE_STATE_EXP_OPEN = 0x3,
    BLKIO_ZONE_STATE_CLOSED = 0x4,
    BLKIO_ZONE_STATE_READONLY = 0xD,
    BLKIO_ZONE_STATE_FULL = 0xE,
    BLKIO_ZONE_STATE_OFFLINE = 0xF
};

struct blkio_zone {
    uint64_t start;         /* bytes from the start of the device */
    uint64_t len;           /* distance to the next zone, in bytes */
    uint64_t capacity;      /* bytes of it that can be used */
    uint64_t write_pointer; /* where the next write goes, in bytes from the start of the device */
    uint8_t zone_type;
    uint8_t zone_state;
    uint8_t reset;          /* 1: the device recommends to reset the zone */
    uint8_t reserved_[29];
};

/* Fills zones, at most nr_zones, from the zone of offset on. The completion's ret is how many were filled. */
void blkioq_report_zones(struct blkioq *q, uint64_t offset, struct blkio_zone *zones, uint32_t nr_zones,
                         void *user_data, uint32_t flags);

void blkioq_close_zone(struct blkioq *q, uint64_t offset, void *user_data, uint32_t flags);
void blkioq_finish_zone(struct blkioq *q, uint64_t offset, void *user_data, uint32_t flags);
void blkioq_open_zone(struct blkioq *q, uint64_t offset, void *user_data, uint32_t flags);
void blkioq_reset_zone(struct blkioq *q, uint64_t offset, void *user_data, uint32_t flags);

void blkioq_close_all_zones(struct blkioq *q, void *user_data, uint32_t flags);
void blkioq_finish_all_zones(struct blkioq *q, void *user_data, uint32_t flags);
void blkioq_open_all_zones(struct blkioq *q, void *user_data, uint32_t flags);
void blkioq_reset_all_zones(struct blkioq *q, void *user_data, uint32_t flags);

/*
 * Completions
 */

/*
 * Submits what was enqueued, waits for min_completions, and fills in at most max_completions of them. Returns how many.
 * -EINVAL: min_completions is above max_completions or above what is outstanding. -ETIME: the timeout has passed; no
 * completion is lost. *timeout is what was left of it. timeout may be NULL: no limit.
 */
int blkioq_do_io(struct blkioq *q, struct blkio_completion *completions, int min_completions, int max_completions,
                 struct timespec *timeout);

/* The same, with *sig as the thread's signal mask while it waits. -EINTR: a signal came. Not for poll queues. */
int blkioq_do_io_interruptible(struct blkioq *q, struct blkio_completion *completions, int min_completions,
                               int max_completions, struct timespec *timeout, const sigset_t *sig);

/*
 * A descriptor that becomes readable when blkioq_do_io() should be called: read 8 bytes from it first. It is
 * non-blocking and belongs to the queue. -1 for a poll queue.
 */
int blkioq_get_completion_fd(struct blkioq *q);

/* Whether completions make the descriptor readable; off at first. Holds for requests that are in flight, too. */
void blkioq_set_completion_fd_enabled(struct blkioq *q, bool enable);

/*
 * Freestone only: connect and start without blocking, for programs with an event loop and devices behind a network.
 *
 *     ret = blkio_connect_begin(b);
 *     ... wait until blkio_get_control_fd(b) is readable ...
 *     ret = blkio_control_result(b);
 *
 * While an operation runs, all other functions on the instance are -EBUSY.
 */
#define BLKIO_FREESTONE 1

/* Begin blkio_connect() or blkio_start(). A negative errno at once, or 0: the end is told by the control fd. */
int blkio_connect_begin(struct blkio *b);
int blkio_start_begin(struct blkio *b);

/* Readable when the operation has ended, until its result is fetched. Belongs to the instance. -ENOENT before the
 * first operation. */
int blkio_get_control_fd(struct blkio *b);

/* -EAGAIN while the operation runs; then, once, what blkio_connect() or blkio_start() would have returned; -ENOENT
 * when there is none. */
int blkio_control_result(struct blkio *b);

/* Makes the operation that runs end soon: its result is -ECANCELED and the state is as before, unless it was faster.
 * Does nothing when none runs. */
int blkio_cancel(struct blkio *b);

#ifdef __cplusplus
}
#endif

#endif /* BLKIO_H */

/*
 * What a program that was compiled against libblkio 1.5 has built in: sizes, offsets, values and prototypes. Nothing
 * here runs; that it compiles against a blkio.h is the test. Numbers are for 64-bit Linux.
 */
#include <stddef.h>
#include <time.h>
#include <signal.h>
#include <blkio.h>

#define SAME(a, b) _Static_assert((a) == (b), #a " must be " #b)
#define FIELD(type, field, offset, size)                      \
    SAME(offsetof(struct type, field), offset);               \
    SAME(sizeof(((struct type *)0)->field), size)

SAME(sizeof(struct blkio_mem_region), 40);
SAME(_Alignof(struct blkio_mem_region), 8);
FIELD(blkio_mem_region, addr, 0, 8);
FIELD(blkio_mem_region, len, 8, 8);
FIELD(blkio_mem_region, iova, 16, 8);
FIELD(blkio_mem_region, fd_offset, 24, 8);
FIELD(blkio_mem_region, fd, 32, 4);
FIELD(blkio_mem_region, flags, 36, 4);

SAME(sizeof(struct blkio_completion), 32);
SAME(_Alignof(struct blkio_completion), 8);
FIELD(blkio_completion, user_data, 0, 8);
FIELD(blkio_completion, error_msg, 8, 8);
FIELD(blkio_completion, ret, 16, 4);
FIELD(blkio_completion, reserved_, 20, 12);

SAME(sizeof(struct blkio_zone), 64);
SAME(_Alignof(struct blkio_zone), 8);
FIELD(blkio_zone, start, 0, 8);
FIELD(blkio_zone, len, 8, 8);
FIELD(blkio_zone, capacity, 16, 8);
FIELD(blkio_zone, write_pointer, 24, 8);
FIELD(blkio_zone, zone_type, 32, 1);
FIELD(blkio_zone, zone_state, 33, 1);
FIELD(blkio_zone, reset, 34, 1);
FIELD(blkio_zone, reserved_, 35, 29);

SAME(BLKIO_REQ_FUA, 1);
SAME(BLKIO_REQ_NO_UNMAP, 2);
SAME(BLKIO_REQ_NO_FALLBACK, 4);
SAME(BLKIO_ZONE_TYPE_CONVENTIONAL, 1);
SAME(BLKIO_ZONE_TYPE_SEQWRITE_REQ, 2);
SAME(BLKIO_ZONE_TYPE_SEQWRITE_PREF, 3);
SAME(BLKIO_ZONE_STATE_EMPTY, 1);
SAME(BLKIO_ZONE_STATE_IMP_OPEN, 2);
SAME(BLKIO_ZONE_STATE_EXP_OPEN, 3);
SAME(BLKIO_ZONE_STATE_CLOSED, 4);
SAME(BLKIO_ZONE_STATE_READONLY, 13);
SAME(BLKIO_ZONE_STATE_FULL, 14);
SAME(BLKIO_ZONE_STATE_OFFLINE, 15);

#define PROTOTYPE(function, ...) \
    _Static_assert(__builtin_types_compatible_p(__typeof__(&function), __VA_ARGS__), #function)

typedef struct blkio *instance;
typedef struct blkioq *queue;
typedef struct blkio_completion *completions;

PROTOTYPE(blkio_get_error_msg, const char *(*)(void));
PROTOTYPE(blkio_create, int (*)(const char *, instance *));
PROTOTYPE(blkio_connect, int (*)(instance));
PROTOTYPE(blkio_start, int (*)(instance));
PROTOTYPE(blkio_destroy, void (*)(instance *));
PROTOTYPE(blkio_get_bool, int (*)(instance, const char *, bool *));
PROTOTYPE(blkio_get_int, int (*)(instance, const char *, int *));
PROTOTYPE(blkio_get_uint64, int (*)(instance, const char *, uint64_t *));
PROTOTYPE(blkio_get_str, int (*)(instance, const char *, char **));
PROTOTYPE(blkio_set_bool, int (*)(instance, const char *, bool));
PROTOTYPE(blkio_set_int, int (*)(instance, const char *, int));
PROTOTYPE(blkio_set_uint64, int (*)(instance, const char *, uint64_t));
PROTOTYPE(blkio_set_str, int (*)(instance, const char *, const char *));
PROTOTYPE(blkio_alloc_mem_region, int (*)(instance, struct blkio_mem_region *, size_t));
PROTOTYPE(blkio_free_mem_region, void (*)(instance, const struct blkio_mem_region *));
PROTOTYPE(blkio_map_mem_region, int (*)(instance, const struct blkio_mem_region *));
PROTOTYPE(blkio_unmap_mem_region, void (*)(instance, const struct blkio_mem_region *));
PROTOTYPE(blkio_get_queue, queue (*)(instance, int));
PROTOTYPE(blkio_get_poll_queue, queue (*)(instance, int));
PROTOTYPE(blkio_add_queue, int (*)(instance));
PROTOTYPE(blkio_add_poll_queue, int (*)(instance));
PROTOTYPE(blkio_remove_queue, int (*)(instance, int));
PROTOTYPE(blkio_remove_poll_queue, int (*)(instance, int));
PROTOTYPE(blkioq_read, void (*)(queue, uint64_t, void *, size_t, void *, uint32_t));
PROTOTYPE(blkioq_write, void (*)(queue, uint64_t, const void *, size_t, void *, uint32_t));
PROTOTYPE(blkioq_readv, void (*)(queue, uint64_t, const struct iovec *, int, void *, uint32_t));
PROTOTYPE(blkioq_writev, void (*)(queue, uint64_t, struct iovec *, int, void *, uint32_t));
PROTOTYPE(blkioq_write_zeroes, void (*)(queue, uint64_t, uint64_t, void *, uint32_t));
PROTOTYPE(blkioq_discard, void (*)(queue, uint64_t, uint64_t, void *, uint32_t));
PROTOTYPE(blkioq_flush, void (*)(queue, void *, uint32_t));
PROTOTYPE(blkioq_report_zones, void (*)(queue, uint64_t, struct blkio_zone *, uint32_t, void *, uint32_t));
PROTOTYPE(blkioq_close_zone, void (*)(queue, uint64_t, void *, uint32_t));
PROTOTYPE(blkioq_finish_zone, void (*)(queue, uint64_t, void *, uint32_t));
PROTOTYPE(blkioq_open_zone, void (*)(queue, uint64_t, void *, uint32_t));
PROTOTYPE(blkioq_reset_zone, void (*)(queue, uint64_t, void *, uint32_t));
PROTOTYPE(blkioq_close_all_zones, void (*)(queue, void *, uint32_t));
PROTOTYPE(blkioq_finish_all_zones, void (*)(queue, void *, uint32_t));
PROTOTYPE(blkioq_open_all_zones, void (*)(queue, void *, uint32_t));
PROTOTYPE(blkioq_reset_all_zones, void (*)(queue, void *, uint32_t));
PROTOTYPE(blkioq_do_io, int (*)(queue, completions, int, int, struct timespec *));
PROTOTYPE(blkioq_do_io_interruptible,
          int (*)(queue, completions, int, int, struct timespec *, const sigset_t *));
PROTOTYPE(blkioq_get_completion_fd, int (*)(queue));
PROTOTYPE(blkioq_set_completion_fd_enabled, void (*)(queue, bool));

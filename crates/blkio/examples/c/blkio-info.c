/* blkio-info DEVICE: what a device is and can do: every property, as text. */
#include "common.h"

static const char *const properties[] = {
    "driver", "path", "fd", "uri", "export", "graph", "direct", "read-only", "capacity", "can-grow", "flush-needed",
    "request-alignment", "optimal-io-alignment", "optimal-io-size", "buf-alignment", "optimal-buf-alignment",
    "max-segments", "max-segment-len", "max-transfer", "max-write-zeroes-len", "max-discard-len",
    "discard-alignment", "discard-alignment-offset", "supports-fua-natively", "can-add-queues", "max-queues",
    "num-queues", "supports-poll-queues", "num-poll-queues", "num-entries", "queue-size", "max-queue-size",
    "connect-timeout-ms", "cpus", "num-cores", "poll-us",
    "needs-mem-regions", "needs-mem-region-fd", "mem-region-alignment", "max-mem-regions", "may-pin-mem-regions",
    "zoned", "zone_size", "nr_zones", "max_open_zones", "max_active_zones", "append_support",
    "zone_append_max_bytes",
};

int main(int argc, char **argv)
{
    if (argc != 2 || argv[1][0] == '-') {
        fprintf(stderr, "usage: blkio-info DEVICE\n" HOW_TO_WRITE_A_DEVICE);
        return 2;
    }
    struct blkio *b = connect_device(argv[1], false);
    for (size_t i = 0; i < sizeof properties / sizeof *properties; i++) {
        char *value;
        int ret = blkio_get_str(b, properties[i], &value);
        if (ret == -ENOENT)
            continue; /* a property of other drivers */
        need(ret, properties[i]);
        printf("%-26s %s\n", properties[i], value);
        free(value);
    }
    blkio_destroy(&b);
    return 0;
}

/* Single requests: data, flags, ranges, alignment, segments. */
#define _GNU_SOURCE
#include "device.h"
#include "harness.h"

#include <limits.h>
#include <sys/stat.h>

TEST(written_data_is_read_back, WRITES)
{
    struct device d = open_device();
    fill(d.buf, 64 * KIB, 1);
    CHECK_EQ(do_write(&d, 128 * KIB, d.buf, 64 * KIB), 0);
    memset(d.buf + MIB, 0, 64 * KIB);
    CHECK_EQ(do_read(&d, 128 * KIB, d.buf + MIB, 64 * KIB), 0);
    CHECK_EQ(first_difference(d.buf + MIB, 64 * KIB, 1), -1);
    close_device(&d);
}

TEST(vectors_gather_and_scatter, WRITES)
{
    struct device d = open_device();
    int count = get_int(d.b, "max-segments");
    count = count > 32 ? 32 : count;
    struct iovec out[32], in[32];
    for (int i = 0; i < count; i++) {
        out[i] = (struct iovec){d.buf + (size_t)(2 * (count - i)) * 4096, 4096};
        in[i] = (struct iovec){d.buf + MIB + (size_t)(3 * i) * 4096, 4096};
        fill(out[i].iov_base, 4096, (uint64_t)(100 + i));
    }
    blkioq_writev(d.q, 256 * KIB, out, count, out, 0);
    CHECK_EQ(reap_ret(d.q, out), 0);
    blkioq_readv(d.q, 256 * KIB, in, count, in, 0);
    CHECK_EQ(reap_ret(d.q, in), 0);
    for (int i = 0; i < count; i++)
        CHECK_EQ(first_difference(in[i].iov_base, 4096, (uint64_t)(100 + i)), -1);
    close_device(&d);
}

TEST(segments_may_have_any_length_where_buf_alignment_is_1, WRITES)
{
    struct device d = open_device();
    enum { SEGMENTS = 7 };
    struct iovec iovec[SEGMENTS];
    size_t done = 0, at = 1;
    if (get_int(d.b, "buf-alignment") != 1 || get_int(d.b, "max-segments") < SEGMENTS)
        SKIP("buf-alignment is %d", get_int(d.b, "buf-alignment"));
    fill(d.buf, 4096, 3);
    CHECK_EQ(do_write(&d, 0, d.buf, 4096), 0);
    for (int i = 0; i < SEGMENTS; i++) {
        size_t len = i == SEGMENTS - 1 ? 4096 - done : (size_t)(1 + 97 * i);
        iovec[i] = (struct iovec){d.buf + MIB + at, len};
        done += len;
        at += len + 5;
    }
    blkioq_readv(d.q, 0, iovec, SEGMENTS, NULL, 0);
    CHECK_EQ(reap_ret(d.q, NULL), 0);
    char whole[4096], *end = whole;
    for (int i = 0; i < SEGMENTS; i++)
        end = mempcpy(end, iovec[i].iov_base, iovec[i].iov_len);
    CHECK_EQ(first_difference(whole, 4096, 3), -1);
    close_device(&d);
}

TEST(user_data_comes_back_as_it_was, 0)
{
    struct device d = open_device();
    void *const data[] = {NULL, (void *)1, (void *)-1, &d, (void *)0x123456789abcdefu};
    for (size_t i = 0; i < sizeof data / sizeof *data; i++) {
        blkioq_read(d.q, 0, d.buf, d.unit, data[i], 0);
        CHECK_EQ(reap_ret(d.q, data[i]), 0);
        blkioq_read(d.q, 0, d.buf, d.unit, data[i], 1u << 31);
        CHECK_EQ(reap_ret(d.q, data[i]), -EINVAL);
    }
    close_device(&d);
}

TEST(flush_succeeds, 0)
{
    struct device d = open_device();
    blkioq_flush(d.q, &d, 0);
    int ret = reap_ret(d.q, &d);
    if (options.poll && ret == -ENOTSUP)
        SKIP("no flush on poll queues");
    CHECK_EQ(ret, 0);
    close_device(&d);
}

/* Enqueues the request of a kind; its buffers are in the region. */
enum kind { READ, WRITE, READV, WRITEV, ZEROES, DISCARD, FLUSH, REPORT, CLOSE, FINISH, OPEN, RESET, CLOSE_ALL,
            FINISH_ALL, OPEN_ALL, RESET_ALL, NUM_KINDS };
static const char *const kind_names[] = {
    "read", "write", "readv", "writev", "write_zeroes", "discard", "flush", "report_zones", "close_zone",
    "finish_zone", "open_zone", "reset_zone", "close_all_zones", "finish_all_zones", "open_all_zones",
    "reset_all_zones"};

static void enqueue(struct device *d, enum kind kind, uint64_t start, size_t len, uint32_t flags)
{
    static struct iovec iovec;
    static struct blkio_zone zone;
    iovec = (struct iovec){d->buf, len};
    switch (kind) {
    case READ: blkioq_read(d->q, start, d->buf, len, d, flags); break;
    case WRITE: blkioq_write(d->q, start, d->buf, len, d, flags); break;
    case READV: blkioq_readv(d->q, start, &iovec, 1, d, flags); break;
    case WRITEV: blkioq_writev(d->q, start, &iovec, 1, d, flags); break;
    case ZEROES: blkioq_write_zeroes(d->q, start, len, d, flags); break;
    case DISCARD: blkioq_discard(d->q, start, len, d, flags); break;
    case FLUSH: blkioq_flush(d->q, d, flags); break;
    case REPORT: blkioq_report_zones(d->q, start, &zone, 1, d, flags); break;
    case CLOSE: blkioq_close_zone(d->q, start, d, flags); break;
    case FINISH: blkioq_finish_zone(d->q, start, d, flags); break;
    case OPEN: blkioq_open_zone(d->q, start, d, flags); break;
    case RESET: blkioq_reset_zone(d->q, start, d, flags); break;
    case CLOSE_ALL: blkioq_close_all_zones(d->q, d, flags); break;
    case FINISH_ALL: blkioq_finish_all_zones(d->q, d, flags); break;
    case OPEN_ALL: blkioq_open_all_zones(d->q, d, flags); break;
    default: blkioq_reset_all_zones(d->q, d, flags); break;
    }
}

static int result_of(struct device *d, enum kind kind, uint64_t start, size_t len, uint32_t flags)
{
    enqueue(d, kind, start, len, flags);
    return reap_ret(d->q, d);
}

TEST(a_flag_that_a_request_does_not_take_is_einval, 0)
{
    struct device d = open_device();
    for (enum kind kind = READ; kind < NUM_KINDS; kind++) {
        for (int bit = 0; bit < 32; bit++) {
            bool allowed = (kind == ZEROES && bit <= 2) || ((kind == WRITE || kind == WRITEV) && bit == 0);
            if (allowed)
                continue;
            int ret = result_of(&d, kind, 0, d.unit, 1u << bit);
            if (ret != -EINVAL)
                FAIL("%s with flag bit %d: %s, expected EINVAL", kind_names[kind], bit, words(ret));
        }
    }
    CHECK_EQ(do_read(&d, 0, d.buf, d.unit), 0);
    close_device(&d);
}

TEST(a_refused_request_has_a_message, 0)
{
    struct device d = open_device();
    enqueue(&d, READ, 0, d.unit, BLKIO_REQ_NO_UNMAP);
    struct blkio_completion completion = reap(d.q);
    CHECK_EQ(completion.ret, -EINVAL);
    CHECK(completion.error_msg && (strstr(completion.error_msg, "flag") || strstr(completion.error_msg, "NO_UNMAP")));
    close_device(&d);
}

/* Programs compare these texts: libblkio's own tests do. */
TEST(a_refused_flag_is_named_as_libblkio_names_it, 0)
{
    struct device d = open_device();
    static const struct { enum kind kind; uint32_t flags; const char *text; } wrong[] = {
        {READ, UINT32_MAX, "unsupported bits in request flags"},
        {WRITE, 1u << 9 | BLKIO_REQ_FUA, "unsupported bits in request flags"},
        {READ, BLKIO_REQ_FUA, "BLKIO_REQ_FUA is invalid for this request type"},
        {READ, BLKIO_REQ_NO_UNMAP, "BLKIO_REQ_NO_UNMAP is invalid for this request type"},
        {WRITEV, BLKIO_REQ_FUA | BLKIO_REQ_NO_UNMAP, "BLKIO_REQ_NO_UNMAP is invalid for this request type"},
        {FLUSH, BLKIO_REQ_FUA, "BLKIO_REQ_FUA is invalid for this request type"},
        {DISCARD, BLKIO_REQ_NO_FALLBACK | BLKIO_REQ_NO_UNMAP, "BLKIO_REQ_NO_UNMAP is invalid for this request type"},
        {WRITE, BLKIO_REQ_NO_FALLBACK, "BLKIO_REQ_NO_FALLBACK is invalid for this request type"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        enqueue(&d, wrong[i].kind, 0, d.unit, wrong[i].flags);
        struct blkio_completion completion = reap(d.q);
        CHECK_EQ(completion.ret, -EINVAL);
        CHECK(completion.error_msg);
        if (strcmp(completion.error_msg, wrong[i].text))
            FAIL("%s with flags %#x: \"%s\", expected \"%s\"", kind_names[wrong[i].kind], wrong[i].flags, completion.error_msg,
                 wrong[i].text);
    }
    close_device(&d);
}

TEST(fua_writes_succeed, WRITES)
{
    struct device d = open_device();
    struct iovec iovec = {d.buf, d.unit};
    fill(d.buf, d.unit, 5);
    CHECK_EQ(result_of(&d, WRITE, 0, d.unit, BLKIO_REQ_FUA), 0);
    blkioq_writev(d.q, d.unit, &iovec, 1, &d, BLKIO_REQ_FUA);
    CHECK_EQ(reap_ret(d.q, &d), 0);
    CHECK_EQ(do_read(&d, 0, d.buf + MIB, 2 * d.unit), 0);
    CHECK_EQ(first_difference(d.buf + MIB, d.unit, 5), -1);
    CHECK_EQ(first_difference(d.buf + MIB + d.unit, d.unit, 5), -1);
    close_device(&d);
}

TEST(write_zeroes_zeroes_its_range_only, WRITES)
{
    struct device d = open_device();
    int succeeded = 0;
    for (uint32_t flags = 0; flags < 8; flags++) {
        fill(d.buf, 64 * KIB, flags);
        CHECK_EQ(do_write(&d, MIB, d.buf, 64 * KIB), 0);
        int ret = result_of(&d, ZEROES, MIB + 16 * KIB, 32 * KIB, flags);
        if (ret == -ENOTSUP)
            continue;
        if (ret != 0)
            FAIL("flags %u: %s", flags, words(ret));
        succeeded++;
        CHECK_EQ(do_read(&d, MIB, d.buf, 64 * KIB), 0);
        for (size_t i = 0; i < 64 * KIB; i++)
            if (i >= 16 * KIB && i < 48 * KIB && d.buf[i] != 0)
                FAIL("flags %u: byte %zu is not zero", flags, i);
        CHECK_EQ(first_difference(d.buf, 16 * KIB, flags), -1);
        CHECK_EQ(first_difference(d.buf + 48 * KIB, 16 * KIB, flags + 48 * KIB / 8), -1);
    }
    if (!succeeded)
        SKIP("write zeroes is not supported");
    close_device(&d);
}

/* NO_UNMAP or not, with NO_FALLBACK it may be refused; without it, a regular queue always can. */
TEST(write_zeroes_without_no_fallback_is_always_supported, WRITES | STRICT | REGULAR)
{
    struct device d = open_device();
    CHECK_EQ(result_of(&d, ZEROES, 0, 64 * KIB, 0), 0);
    CHECK_EQ(result_of(&d, ZEROES, 0, 64 * KIB, BLKIO_REQ_NO_UNMAP), 0);
    CHECK_EQ(result_of(&d, ZEROES, 0, 64 * KIB, BLKIO_REQ_FUA), 0);
    close_device(&d);
}

TEST(discard_leaves_its_neighbours, WRITES)
{
    struct device d = open_device();
    size_t unit = (size_t)get_int(d.b, "discard-alignment");
    unit = unit > 64 * KIB || unit < 4096 ? 64 * KIB : unit;
    fill(d.buf, 3 * unit, 9);
    CHECK_EQ(do_write(&d, MIB, d.buf, 3 * unit), 0);
    int ret = result_of(&d, DISCARD, MIB + unit, unit, 0);
    if (ret != 0)
        CHECK_EQ(ret, -ENOTSUP);
    CHECK_EQ(do_read(&d, MIB, d.buf, 3 * unit), 0);
    CHECK_EQ(first_difference(d.buf, unit, 9), -1);
    CHECK_EQ(first_difference(d.buf + 2 * unit, unit, 9 + 2 * unit / 8), -1);
    if (ret != 0)
        SKIP("discard is not supported");
    close_device(&d);
}

TEST(a_request_of_another_kind_of_device_is_enotsup, 0)
{
    struct device d = open_device();
    if (has_property(d.b, "zoned") && get_int(d.b, "zoned") > 0)
        SKIP("a zoned device");
    for (enum kind kind = REPORT; kind < NUM_KINDS; kind++)
        if (result_of(&d, kind, 0, d.unit, 0) != -ENOTSUP)
            FAIL("%s is not -ENOTSUP", kind_names[kind]);
    close_device(&d);
}

TEST(a_start_that_is_not_aligned_is_einval, 0)
{
    struct device d = open_device();
    int alignment = get_int(d.b, "request-alignment");
    if (alignment == 1)
        SKIP("request-alignment is 1");
    for (enum kind kind = READ; kind <= WRITEV; kind++) {
        CHECK_EQ(result_of(&d, kind, 1, d.unit, 0), -EINVAL);
        CHECK_EQ(result_of(&d, kind, (uint64_t)alignment / 2, d.unit, 0), -EINVAL);
    }
    close_device(&d);
}

TEST(a_length_that_is_not_aligned_is_einval, STRICT)
{
    struct device d = open_device();
    int alignment = get_int(d.b, "request-alignment");
    if (alignment == 1)
        SKIP("request-alignment is 1");
    for (enum kind kind = READ; kind <= ZEROES; kind++) {
        CHECK_EQ(result_of(&d, kind, 0, 1, 0), -EINVAL);
        CHECK_EQ(result_of(&d, kind, 0, d.unit + (size_t)alignment / 2, 0), -EINVAL);
    }
    close_device(&d);
}

TEST(a_buffer_that_is_not_aligned_fails, 0)
{
    struct device d = open_device();
    if (get_int(d.b, "buf-alignment") == 1)
        SKIP("buf-alignment is 1");
    char *whole = d.buf;
    d.buf++;
    if (options.freestone)
        CHECK_EQ(result_of(&d, READ, 0, d.unit, 0), -EINVAL);
    else
        result_of(&d, READ, 0, d.unit, 0); /* memory is often aligned well enough */
    d.buf = whole;
    CHECK_EQ(result_of(&d, READ, 0, d.unit, 0), 0);
    close_device(&d);
}

TEST(out_of_range_fails_and_harms_no_other, 0)
{
    struct device d = open_device();
    static const enum kind kinds[] = {READ, READV, WRITE, WRITEV};
    if (can_grow(&d))
        SKIP("can-grow");
    const uint64_t starts[] = {d.capacity, d.capacity + d.unit, d.capacity - d.unit, (uint64_t)INT64_MAX + 1 - d.unit,
                               (uint64_t)1 << 63, UINT64_MAX - d.unit + 1};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        if (kinds[k] >= WRITE && !options.scratch)
            continue;
        for (size_t i = 0; i < sizeof starts / sizeof *starts; i++) {
            int ret = result_of(&d, kinds[k], starts[i], 2 * d.unit, 0);
            if (ret >= 0)
                FAIL("%s at %ju of %ju: %s", kind_names[kinds[k]], (uintmax_t)starts[i], (uintmax_t)d.capacity,
                     words(ret));
        }
    }
    CHECK_EQ(do_read(&d, d.capacity - d.unit, d.buf, d.unit), 0);
    CHECK_EQ(get_uint64(d.b, "capacity"), d.capacity);
    close_device(&d);
}

static bool is_driver(const char *start)
{
    return strncmp(options.driver, start, strlen(start)) == 0;
}

/* libblkio 1.5.0 hands these to the device: virtio-blk has one error for all, the kernel's file operations have EINVAL. */
TEST(beyond_the_end_fails_as_in_libblkio, 0)
{
    struct device d = open_device();
    if (can_grow(&d))
        SKIP("can-grow");
    if (!is_driver("virtio-blk-"))
        SKIP("not a virtio-blk driver");
    const uint64_t starts[] = {d.capacity, d.capacity + 8 * d.unit, d.capacity - d.unit, (uint64_t)1 << 63};
    for (enum kind kind = READ; kind <= DISCARD; kind++) {
        if (kind != READ && kind != READV && !options.scratch)
            continue;
        for (size_t i = 0; i < sizeof starts / sizeof *starts; i++) {
            int ret = result_of(&d, kind, starts[i], 2 * d.unit, 0);
            if (ret != -EIO && !(kind >= ZEROES && ret == -ENOTSUP))
                FAIL("%s at %ju of %ju: %s, expected EIO", kind_names[kind], (uintmax_t)starts[i],
                     (uintmax_t)d.capacity, words(ret));
        }
    }
    CHECK_EQ(do_read(&d, 0, d.buf, d.unit), 0);
    close_device(&d);
}

TEST(the_io_uring_driver_has_the_kernels_errors, 0)
{
    if (strcmp(options.driver, "io_uring"))
        SKIP("not driver io_uring");
    struct device d = open_device();
    char *whole = d.buf;
    d.buf = NULL;
    int ret = result_of(&d, READ, 0, d.unit, 0);
    d.buf = whole;
    CHECK_EQ(ret, -EFAULT);
    for (enum kind kind = ZEROES; kind <= DISCARD && options.scratch && !options.poll; kind++) {
        CHECK_EQ(result_of(&d, kind, 0, 0, 0), -EINVAL);
        CHECK_EQ(result_of(&d, kind, (uint64_t)1 << 63, d.unit, 0), -EINVAL);
    }
    close_device(&d);
}

TEST(an_offset_that_no_file_has_fails, 0)
{
    struct device d = open_device();
    for (enum kind kind = READ; kind <= ZEROES; kind++) {
        if (kind != READ && kind != READV && !options.scratch)
            continue;
        CHECK(result_of(&d, kind, UINT64_MAX - d.unit + 1, 2 * d.unit, 0) < 0);
        CHECK(result_of(&d, kind, UINT64_MAX / 512 * 512 - 4095, 4096, 0) < 0);
    }
    close_device(&d);
}

/* libblkio 1.5.0 over vhost-user never completes these. */
TEST(a_range_beyond_all_limits_fails, WRITES | STRICT)
{
    struct device d = open_device();
    CHECK(result_of(&d, DISCARD, 0, SIZE_MAX - 4095, 0) < 0);
    CHECK(result_of(&d, ZEROES, 0, SIZE_MAX - 4095, 0) < 0);
    CHECK(result_of(&d, READ, 0, SIZE_MAX - 4095, 0) < 0);
    CHECK(result_of(&d, WRITE, 0, SIZE_MAX - 4095, 0) < 0);
    CHECK_EQ(do_read(&d, 0, d.buf, d.unit), 0);
    close_device(&d);
}

TEST(a_negative_iovcnt_is_einval, 0)
{
    struct device d = open_device();
    struct iovec iovec = {d.buf, d.unit};
    blkioq_readv(d.q, 0, &iovec, -1, &d, 0);
    CHECK_EQ(reap_ret(d.q, &d), -EINVAL);
    blkioq_readv(d.q, 0, &iovec, INT_MIN, &d, 0);
    CHECK_EQ(reap_ret(d.q, &d), -EINVAL);
    blkioq_writev(d.q, 0, &iovec, -1, &d, 0);
    CHECK_EQ(reap_ret(d.q, &d), -EINVAL);
    close_device(&d);
}

static int readv_of(struct device *d, int count, size_t segment)
{
    struct iovec *iovec = calloc((size_t)count, sizeof *iovec);
    for (int i = 0; i < count; i++)
        iovec[i] = (struct iovec){d->buf + (size_t)i * segment % REGION_LEN, segment};
    blkioq_readv(d->q, 0, iovec, count, d, 0);
    int ret = reap_ret(d->q, d);
    free(iovec);
    return ret;
}

TEST(max_segments_is_what_a_request_may_have, 0)
{
    struct device d = open_device();
    CHECK_EQ(readv_of(&d, get_int(d.b, "max-segments"), 512 < d.unit ? d.unit : 512), 0);
    close_device(&d);
}

TEST(more_than_max_segments_is_einval, STRICT)
{
    struct device d = open_device();
    int most = get_int(d.b, "max-segments");
    CHECK_EQ(readv_of(&d, most + 1, d.unit), -EINVAL);
    CHECK_EQ(readv_of(&d, 10 * most, d.unit), -EINVAL);
    CHECK_EQ(do_read(&d, 0, d.buf, d.unit), 0);
    close_device(&d);
}

TEST(a_request_without_bytes_completes, STRICT)
{
    struct device d = open_device();
    for (enum kind kind = READ; kind <= DISCARD; kind++) {
        if (kind != READ && kind != READV && !options.scratch)
            continue;
        int ret = result_of(&d, kind, 0, 0, 0);
        if (ret != 0 && ret != -EINVAL && !(kind >= ZEROES && ret == -ENOTSUP))
            FAIL("%s of no bytes: %s", kind_names[kind], words(ret));
    }
    blkioq_readv(d.q, 0, NULL, 0, &d, 0);
    reap_ret(d.q, &d);
    struct iovec iovec[] = {{d.buf, d.unit}, {d.buf + d.unit, 0}, {NULL, 0}, {d.buf + 2 * d.unit, d.unit}};
    blkioq_readv(d.q, 0, iovec, 4, &d, 0);
    CHECK_EQ(reap_ret(d.q, &d), 0);
    CHECK_EQ(do_read(&d, 0, d.buf, d.unit), 0);
    close_device(&d);
}

TEST(a_long_transfer_is_done_whole, WRITES)
{
    struct device d = open_device();
    fill(d.buf, MIB, 11);
    CHECK_EQ(do_write(&d, MIB, d.buf, MIB), 0);
    CHECK_EQ(do_read(&d, MIB, d.buf + MIB, MIB), 0);
    CHECK_EQ(first_difference(d.buf + MIB, MIB, 11), -1);
    close_device(&d);
}

/* Read-only */

static struct device open_read_only(void)
{
    struct device d = {.b = created()};
    CHECK_RET(blkio_set_bool(d.b, "read-only", true), 0);
    CHECK_RET(blkio_connect(d.b), 0);
    if (options.poll) {
        CHECK_RET(blkio_set_int(d.b, "num-queues", 0), 0);
        CHECK_RET(blkio_set_int(d.b, "num-poll-queues", 1), 0);
    }
    CHECK_RET(blkio_start(d.b), 0);
    d.q = options.poll ? blkio_get_poll_queue(d.b, 0) : blkio_get_queue(d.b, 0);
    d.unit = (uint32_t)get_int(d.b, "request-alignment");
    d.unit = d.unit < 512 ? 512 : d.unit;
    map_region(&d);
    return d;
}

TEST(read_only_lets_reads_and_flush_pass_and_nothing_else, 0)
{
    struct device d = open_read_only();
    CHECK_EQ(get_bool(d.b, "read-only"), true);
    CHECK_EQ(result_of(&d, READ, 0, d.unit, 0), 0);
    CHECK_EQ(result_of(&d, READV, 0, d.unit, 0), 0);
    int ret = result_of(&d, FLUSH, 0, 0, 0);
    if (!(options.poll && ret == -ENOTSUP))
        CHECK_EQ(ret, 0);
    CHECK_EQ(result_of(&d, WRITE, 0, d.unit, 0), -EBADF);
    CHECK_EQ(result_of(&d, WRITEV, 0, d.unit, 0), -EBADF);
    close_device(&d);
}

/* A virtio-blk driver looks at the start, the kernel at the length of zeroes, before read-only. */
TEST(read_only_comes_after_what_is_malformed, 0)
{
    struct device d = open_read_only();
    if (is_driver("virtio-blk-")) {
        CHECK_EQ(result_of(&d, WRITE, 1, d.unit, 0), -EINVAL);
        CHECK_EQ(result_of(&d, WRITE, d.capacity + d.unit, d.unit, 0), -EBADF);
    } else if (!strcmp(options.driver, "io_uring") && !options.poll) {
        CHECK_EQ(result_of(&d, ZEROES, 0, 0, 0), -EINVAL);
        CHECK_EQ(result_of(&d, ZEROES, (uint64_t)1 << 63, d.unit, 0), -EINVAL);
    } else {
        SKIP("a driver that libblkio does not have, or polls");
    }
    close_device(&d);
}

/* Where libblkio 1.5.0 has no support, its answer is -ENOTSUP before it thinks of read-only. */
TEST(read_only_is_ebadf_for_write_zeroes_and_discard, 0)
{
    struct device d = open_read_only();
    for (enum kind kind = ZEROES; kind <= DISCARD; kind++) {
        int ret = result_of(&d, kind, 0, 64 * KIB, 0);
        if (ret != -EBADF && (ret != -ENOTSUP || options.freestone))
            FAIL("%s: %s, expected EBADF", kind_names[kind], words(ret));
    }
    close_device(&d);
}

/* can-grow */

static struct device open_that_grows(void)
{
    struct device d = open_device();
    if (!can_grow(&d))
        SKIP("can-grow is false");
    return d;
}

TEST(reads_beyond_the_end_are_zeroes, 0)
{
    struct device d = open_that_grows();
    memset(d.buf, 0x5a, 8 * KIB);
    CHECK_EQ(do_read(&d, d.capacity - 4 * KIB, d.buf, 8 * KIB), 0);
    for (int i = 4 * KIB; i < 8 * KIB; i++)
        CHECK_EQ(d.buf[i], 0);
    memset(d.buf, 0x5a, 8 * KIB);
    CHECK_EQ(do_read(&d, d.capacity + MIB, d.buf, 4 * KIB), 0);
    for (int i = 0; i < 4 * KIB; i++)
        CHECK_EQ(d.buf[i], 0);
    CHECK_EQ(d.buf[4 * KIB], 0x5a);
    memset(d.buf, 0x5a, 64 * KIB);
    struct iovec iovec[3] = {{d.buf, 4 * KIB}, {d.buf + 8 * KIB, 4 * KIB}, {d.buf + 16 * KIB, 4 * KIB}};
    blkioq_readv(d.q, d.capacity - 4 * KIB, iovec, 3, &d, 0);
    CHECK_EQ(reap_ret(d.q, &d), 0);
    CHECK_EQ(d.buf[4 * KIB], 0x5a);
    CHECK_EQ(d.buf[8 * KIB], 0);
    CHECK_EQ(d.buf[20 * KIB - 1], 0);
    CHECK_EQ(d.buf[20 * KIB], 0x5a);
    CHECK_EQ(get_uint64(d.b, "capacity"), d.capacity);
    close_device(&d);
}

TEST(writes_beyond_the_end_grow_the_device, WRITES)
{
    struct device d = open_that_grows();
    fill(d.buf, 8 * KIB, 21);
    CHECK_EQ(do_write(&d, d.capacity - 4 * KIB, d.buf, 8 * KIB), 0);
    CHECK_EQ(get_uint64(d.b, "capacity"), d.capacity + 4 * KIB);
    CHECK_EQ(do_write(&d, d.capacity + 64 * KIB, d.buf, 4 * KIB), 0);
    CHECK_EQ(get_uint64(d.b, "capacity"), d.capacity + 68 * KIB);
    CHECK_EQ(do_read(&d, d.capacity, d.buf + MIB, 68 * KIB), 0);
    CHECK_EQ(first_difference(d.buf + MIB, 4 * KIB, 21 + 4 * KIB / 8), -1);
    for (int i = 4 * KIB; i < 64 * KIB; i++)
        CHECK_EQ(d.buf[MIB + i], 0);
    CHECK_EQ(first_difference(d.buf + MIB + 64 * KIB, 4 * KIB, 21), -1);
    close_device(&d);
}

/* Memory regions: allocated and mapped, and what requests may point to. */
#define _GNU_SOURCE
#include "device.h"
#include "harness.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static uint64_t alignment(struct device *d)
{
    return get_uint64(d->b, "mem-region-alignment");
}

TEST(an_allocated_region_is_memory_behind_a_file, 0)
{
    struct device d = open_device();
    struct blkio_mem_region r;
    memset(&r, 0x5a, sizeof r);
    CHECK_RET(blkio_alloc_mem_region(d.b, &r, 128 * KIB), 0);
    CHECK_EQ(r.len, 128 * KIB);
    CHECK_EQ((uintptr_t)r.addr % alignment(&d), 0);
    CHECK_EQ((uintptr_t)r.addr % (uintptr_t)get_int(d.b, "buf-alignment"), 0);
    CHECK_EQ(r.iova, 0);
    CHECK_EQ(r.flags, 0);
    CHECK(r.fd >= 0 && r.fd_offset >= 0);
    fill(r.addr, r.len, 1);
    char *same = mmap(NULL, r.len, PROT_READ, MAP_SHARED, r.fd, r.fd_offset);
    CHECK(same != MAP_FAILED);
    CHECK_EQ(first_difference(same, r.len, 1), -1);
    munmap(same, r.len);
    blkio_free_mem_region(d.b, &r);
    CHECK_EQ(fcntl(r.fd, F_GETFD), -1);
    close_device(&d);
}

TEST(the_file_of_a_region_is_closed_across_exec, STRICT)
{
    struct device d = open_device();
    CHECK(fcntl(d.region.fd, F_GETFD) & FD_CLOEXEC);
    close_device(&d);
}

TEST(lengths_that_cannot_be_allocated_fail, 0)
{
    struct device d = open_device();
    struct blkio_mem_region r;
    CHECK_RET(blkio_alloc_mem_region(d.b, &r, 0), -EINVAL);
    CHECK_RET(blkio_alloc_mem_region(d.b, &r, (size_t)1 << 62), -ENOMEM);
    if (alignment(&d) > 1) {
        CHECK_RET(blkio_alloc_mem_region(d.b, &r, alignment(&d) + 1), -EINVAL);
        CHECK_RET(blkio_alloc_mem_region(d.b, &r, SIZE_MAX), -EINVAL);
    }
    close_device(&d);
}

TEST(regions_are_for_the_state_started, 0)
{
    char *memory = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct blkio_mem_region r = {.addr = memory, .len = 4096, .fd = -1};
    struct blkio *b = created();
    CHECK_FAILS(blkio_alloc_mem_region(b, &r, 4096));
    CHECK_FAILS(blkio_map_mem_region(b, &r));
    blkio_unmap_mem_region(b, &r);
    CHECK_RET(blkio_connect(b), 0);
    CHECK_RET(blkio_map_mem_region(b, &r), -EBUSY);
    blkio_unmap_mem_region(b, &r);
    blkio_destroy(&b);
    munmap(memory, 4096);
}

TEST(a_region_is_mapped_again_after_unmap, 0)
{
    struct device d = open_device();
    for (int i = 0; i < 20; i++) {
        CHECK_EQ(do_read(&d, 0, d.buf, d.unit), 0);
        blkio_unmap_mem_region(d.b, &d.region);
        CHECK_RET(blkio_map_mem_region(d.b, &d.region), 0);
    }
    close_device(&d);
}

TEST(a_region_that_is_mapped_already_is_einval, 0)
{
    struct device d = open_device();
    CHECK_RET(blkio_map_mem_region(d.b, &d.region), -EINVAL);
    CHECK_EQ(do_read(&d, 0, d.buf, d.unit), 0);
    close_device(&d);
}

TEST(unmap_of_what_is_not_mapped_does_nothing, 0)
{
    struct device d = open_device();
    struct blkio_mem_region never, part = d.region;
    CHECK_RET(blkio_alloc_mem_region(d.b, &never, 64 * KIB), 0);
    blkio_unmap_mem_region(d.b, &never);
    part.len /= 2;
    blkio_unmap_mem_region(d.b, &part);
    CHECK_EQ(do_read(&d, 0, d.buf, d.unit), 0);
    blkio_unmap_mem_region(d.b, &d.region);
    blkio_unmap_mem_region(d.b, &d.region);
    blkio_free_mem_region(d.b, &never);
    blkio_free_mem_region(d.b, &d.region);
    blkio_destroy(&d.b);
}

TEST(an_unaligned_region_is_einval, 0)
{
    struct device d = open_device();
    struct blkio_mem_region r = d.region;
    if (alignment(&d) == 1)
        SKIP("mem-region-alignment is 1");
    blkio_unmap_mem_region(d.b, &d.region);
    r.addr = (char *)r.addr + 1;
    CHECK_RET(blkio_map_mem_region(d.b, &r), -EINVAL);
    r = d.region;
    r.len -= 1;
    CHECK_RET(blkio_map_mem_region(d.b, &r), -EINVAL);
    CHECK_RET(blkio_map_mem_region(d.b, &d.region), 0);
    close_device(&d);
}

TEST(regions_that_overlap_are_einval, STRICT)
{
    struct device d = open_device();
    struct blkio_mem_region r = d.region;
    r.len /= 2;
    CHECK_RET(blkio_map_mem_region(d.b, &r), -EINVAL);
    r.addr = (char *)d.region.addr + r.len;
    r.fd_offset += (int64_t)r.len;
    CHECK_RET(blkio_map_mem_region(d.b, &r), -EINVAL);
    CHECK_EQ(do_read(&d, 0, d.buf, d.unit), 0);
    close_device(&d);
}

#define CHECK_REFUSED(d, region, field, bad)                                                         \
    do {                                                                                             \
        struct blkio_mem_region wrong_ = region;                                                     \
        wrong_.field = (bad);                                                                        \
        CHECK_RET(blkio_map_mem_region((d)->b, &wrong_), -EINVAL);                                   \
    } while (0)

TEST(fields_with_impossible_values_are_einval, STRICT)
{
    struct device d = open_device();
    blkio_unmap_mem_region(d.b, &d.region);
    CHECK_REFUSED(&d, d.region, iova, 4096);
    CHECK_REFUSED(&d, d.region, flags, 1);
    CHECK_REFUSED(&d, d.region, len, 0);
    CHECK_REFUSED(&d, d.region, addr, NULL);
    CHECK_REFUSED(&d, d.region, fd_offset, -4096);
    CHECK_REFUSED(&d, d.region, len, SIZE_MAX & ~(size_t)4095);
    if (get_bool(d.b, "needs-mem-region-fd"))
        CHECK_REFUSED(&d, d.region, fd, -1);
    CHECK_RET(blkio_map_mem_region(d.b, &d.region), 0);
    CHECK_EQ(do_read(&d, 0, d.buf, d.unit), 0);
    close_device(&d);
}

TEST(a_region_needs_no_fd_where_the_property_says_so, 0)
{
    struct device d = open_device();
    char *memory = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct blkio_mem_region r = {.addr = memory, .len = MIB, .fd = -1};
    if (get_bool(d.b, "needs-mem-region-fd"))
        SKIP("needs-mem-region-fd");
    CHECK_RET(blkio_map_mem_region(d.b, &r), 0);
    CHECK_EQ(do_read(&d, 0, memory, d.unit), 0);
    blkio_unmap_mem_region(d.b, &r);
    munmap(memory, MIB);
    close_device(&d);
}

static struct blkio_mem_region own_region(size_t len, int64_t offset)
{
    int fd = memfd_create("own", MFD_CLOEXEC);
    CHECK_EQ(ftruncate(fd, offset + (int64_t)len), 0);
    struct blkio_mem_region r = {.len = len, .fd = fd, .fd_offset = offset};
    r.addr = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, offset);
    CHECK(r.addr != MAP_FAILED);
    return r;
}

TEST(own_memory_is_mapped_from_an_offset_of_its_file, WRITES)
{
    struct device d = open_device();
    struct blkio_mem_region r = own_region(MIB, 64 * KIB);
    char *buf = r.addr;
    CHECK_RET(blkio_map_mem_region(d.b, &r), 0);
    fill(buf, d.unit, 7);
    CHECK_EQ(do_write(&d, 0, buf, d.unit), 0);
    CHECK_EQ(do_read(&d, 0, buf + MIB - d.unit, d.unit), 0);
    CHECK_EQ(first_difference(buf + MIB - d.unit, d.unit, 7), -1);
    blkio_unmap_mem_region(d.b, &r);
    close(r.fd);
    munmap(r.addr, r.len);
    close_device(&d);
}

TEST(the_callers_fd_may_be_closed_after_map, 0)
{
    struct device d = open_device();
    struct blkio_mem_region r = own_region(MIB, 0);
    CHECK_RET(blkio_map_mem_region(d.b, &r), 0);
    CHECK_EQ(close(r.fd), 0);
    CHECK_EQ(do_read(&d, 0, r.addr, d.unit), 0);
    blkio_unmap_mem_region(d.b, &r);
    CHECK_EQ(fcntl(r.fd, F_GETFD), -1);
    munmap(r.addr, r.len);
    close_device(&d);
}

TEST(segments_of_a_request_may_lie_in_different_regions, 0)
{
    struct device d = open_device();
    struct blkio_mem_region r;
    if (get_int(d.b, "max-segments") < 2)
        SKIP("max-segments is 1");
    CHECK_RET(blkio_alloc_mem_region(d.b, &r, 64 * KIB), 0);
    CHECK_RET(blkio_map_mem_region(d.b, &r), 0);
    struct iovec iovec[2] = {{r.addr, d.unit}, {d.buf, d.unit}};
    blkioq_readv(d.q, 0, iovec, 2, NULL, 0);
    CHECK_EQ(reap_ret(d.q, NULL), 0);
    blkio_unmap_mem_region(d.b, &r);
    blkio_free_mem_region(d.b, &r);
    close_device(&d);
}

/* libblkio 1.5.0 counts the region of its own rings out, and one region more than the server takes ends the connection. */
TEST(max_mem_regions_can_be_mapped_and_one_more_fails, STRICT)
{
    enum { MOST = 1024, LEN = 4096 };
    static struct blkio_mem_region regions[MOST];
    struct device d = open_device();
    uint64_t most = get_uint64(d.b, "max-mem-regions");
    if (most > MOST)
        SKIP("max-mem-regions is %ju", (uintmax_t)most);
    blkio_unmap_mem_region(d.b, &d.region);
    for (uint64_t i = 0; i < most; i++) {
        CHECK_RET(blkio_alloc_mem_region(d.b, &regions[i], LEN), 0);
        CHECK_RET(blkio_map_mem_region(d.b, &regions[i]), 0);
    }
    CHECK_FAILS(blkio_map_mem_region(d.b, &d.region));
    CHECK_EQ(do_read(&d, 0, regions[most - 1].addr, d.unit), 0);
    blkio_unmap_mem_region(d.b, &regions[0]);
    CHECK_RET(blkio_map_mem_region(d.b, &d.region), 0);
    CHECK_EQ(do_read(&d, 0, d.buf, d.unit), 0);
    blkio_destroy(&d.b);
}

TEST(buffers_need_no_region_where_the_property_says_so, 0)
{
    struct device d = open_device();
    if (get_bool(d.b, "needs-mem-regions"))
        SKIP("needs-mem-regions");
    char *memory = aligned_alloc(4096, 4096);
    CHECK_EQ(do_read(&d, 0, memory, d.unit), 0);
    free(memory);
    close_device(&d);
}

/* libblkio 1.5.0 hands such addresses to the server, which gives up. */
TEST(requests_outside_mapped_memory_fail_and_harm_no_other, STRICT)
{
    struct device d = open_device();
    if (!get_bool(d.b, "needs-mem-regions"))
        SKIP("needs-mem-regions is false");
    char *memory = aligned_alloc(4096, 4096);
    CHECK(do_read(&d, 0, memory, d.unit) < 0);
    CHECK(do_read(&d, 0, d.buf + REGION_LEN - d.unit, 2 * d.unit) < 0);
    CHECK(do_read(&d, 0, d.buf - d.unit, 2 * d.unit) < 0);
    CHECK(do_read(&d, 0, NULL, d.unit) < 0);
    struct iovec iovec[2] = {{d.buf, d.unit}, {memory, d.unit}};
    blkioq_readv(d.q, 0, iovec, 2, NULL, 0);
    CHECK(reap_ret(d.q, NULL) < 0);
    blkio_unmap_mem_region(d.b, &d.region);
    CHECK(do_read(&d, 0, d.buf, d.unit) < 0);
    CHECK_RET(blkio_map_mem_region(d.b, &d.region), 0);
    CHECK_EQ(do_read(&d, 0, d.buf, d.unit), 0);
    free(memory);
    close_device(&d);
}

TEST(free_of_what_was_not_allocated_does_nothing, STRICT)
{
    struct device d = open_device();
    struct blkio_mem_region r = {.addr = d.buf, .len = 4096, .fd = -1}, copy;
    blkio_free_mem_region(d.b, &r);
    CHECK_RET(blkio_alloc_mem_region(d.b, &copy, 64 * KIB), 0);
    blkio_free_mem_region(d.b, &copy);
    blkio_free_mem_region(d.b, &copy);
    CHECK_EQ(do_read(&d, 0, d.buf, d.unit), 0);
    close_device(&d);
}

/* Many requests at once against a model in memory. */
#define _GNU_SOURCE
#include "device.h"
#include "harness.h"

/* The area is cut into blocks; a block is never in two requests at once. Each block holds what follows from its
 * number in `seeds`, 0 for zeroes. */
enum { BLOCK = 4096, BLOCKS = 512, DEPTH = 24, OPERATIONS = 3000, LONGEST = 8 };

struct slot {
    bool busy;
    bool is_read;
    int first, count;
    uint64_t seeds[LONGEST];
    struct iovec iovec[LONGEST];
};

struct model {
    struct device d;
    uint64_t seeds[BLOCKS];
    bool taken[BLOCKS];
    struct slot slots[DEPTH];
    uint64_t random, next_seed;
    bool can_zero;
};

static uint64_t random_below(struct model *m, uint64_t limit)
{
    m->random ^= m->random << 13;
    m->random ^= m->random >> 7;
    m->random ^= m->random << 17;
    return m->random % limit;
}

static char *memory_of(struct model *m, struct slot *slot, int block)
{
    return m->d.buf + ((size_t)(slot - m->slots) * LONGEST + (size_t)block) * BLOCK;
}

static bool reserve(struct model *m, struct slot *slot)
{
    slot->count = 1 + (int)random_below(m, LONGEST);
    slot->first = (int)random_below(m, (uint64_t)(BLOCKS - slot->count));
    for (int i = 0; i < slot->count; i++)
        if (m->taken[slot->first + i])
            return false;
    for (int i = 0; i < slot->count; i++)
        m->taken[slot->first + i] = true;
    return slot->busy = true;
}

static void submit(struct model *m, struct slot *slot)
{
    struct blkioq *q = m->d.q;
    uint64_t start = (uint64_t)slot->first * BLOCK;
    size_t len = (size_t)slot->count * BLOCK;
    char *memory = memory_of(m, slot, 0);
    int kind = (int)random_below(m, m->can_zero ? 5 : 4);
    for (int i = 0; i < slot->count; i++)
        slot->iovec[i] = (struct iovec){memory + (size_t)i * BLOCK, BLOCK};
    slot->is_read = kind < 2;
    if (slot->is_read) {
        memcpy(slot->seeds, m->seeds + slot->first, sizeof *slot->seeds * (size_t)slot->count);
        memset(memory, 0xee, len);
        if (kind == 0)
            blkioq_read(q, start, memory, len, slot, 0);
        else
            blkioq_readv(q, start, slot->iovec, slot->count, slot, 0);
        return;
    }
    for (int i = 0; i < slot->count; i++) {
        m->seeds[slot->first + i] = kind == 4 ? 0 : m->next_seed++;
        if (kind != 4)
            fill(memory + (size_t)i * BLOCK, BLOCK, m->seeds[slot->first + i]);
    }
    if (kind == 2)
        blkioq_write(q, start, memory, len, slot, random_below(m, 8) == 0 ? BLKIO_REQ_FUA : 0);
    else if (kind == 3)
        blkioq_writev(q, start, slot->iovec, slot->count, slot, 0);
    else
        blkioq_write_zeroes(q, start, len, slot, 0);
}

static void check_block(const char *memory, uint64_t seed, int block)
{
    static const char zeroes[BLOCK];
    long at = seed ? first_difference(memory, BLOCK, seed) : memcmp(memory, zeroes, BLOCK) ? 0 : -1;
    if (at >= 0)
        FAIL("block %d differs at byte %ld from what was written (seed %ju)", block, at, (uintmax_t)seed);
}

static void finish(struct model *m, struct blkio_completion *c)
{
    struct slot *slot = c->user_data;
    CHECK(slot >= m->slots && slot < m->slots + DEPTH && slot->busy);
    if (c->ret != 0)
        FAIL("a request for %d blocks at block %d: %s", slot->count, slot->first, words(c->ret));
    for (int i = 0; i < slot->count; i++) {
        if (slot->is_read)
            check_block(memory_of(m, slot, i), slot->seeds[i], slot->first + i);
        m->taken[slot->first + i] = false;
    }
    slot->busy = false;
}

TEST(concurrent_requests_of_all_kinds_keep_data_whole, WRITES)
{
    static struct model m;
    m.d = open_device();
    m.random = 0x2545f4914f6cdd1d;
    m.next_seed = 1000;
    if (get_int(m.d.b, "max-segments") < LONGEST)
        SKIP("max-segments is below %d", LONGEST);
    blkioq_write_zeroes(m.d.q, 0, BLOCKS * BLOCK, &m, 0);
    m.can_zero = reap_ret(m.d.q, &m) == 0;
    memset(m.d.buf, 0, REGION_LEN);
    CHECK_EQ(do_write(&m.d, 0, m.d.buf, BLOCKS * BLOCK), 0);
    int submitted = 0, outstanding = 0;
    while (submitted < OPERATIONS || outstanding > 0) {
        struct blkio_completion c[DEPTH];
        for (int i = 0; i < DEPTH && submitted < OPERATIONS; i++) {
            if (m.slots[i].busy || !reserve(&m, &m.slots[i]))
                continue;
            submit(&m, &m.slots[i]);
            submitted++;
            outstanding++;
        }
        int min = 1 + (int)random_below(&m, (uint64_t)outstanding);
        struct timespec limit = {60, 0};
        int n = blkioq_do_io(m.d.q, c, min, DEPTH, &limit);
        CHECK(n >= min);
        for (int i = 0; i < n; i++)
            finish(&m, &c[i]);
        outstanding -= n;
    }
    CHECK_EQ(do_read(&m.d, 0, m.d.buf, BLOCKS * BLOCK), 0);
    for (int i = 0; i < BLOCKS; i++)
        check_block(m.d.buf + (size_t)i * BLOCK, m.seeds[i], i);
    close_device(&m.d);
}

TEST(data_stays_when_the_instance_goes, WRITES)
{
    struct device d = open_device();
    fill(d.buf, 64 * KIB, 77);
    CHECK_EQ(do_write(&d, 512 * KIB, d.buf, 64 * KIB), 0);
    blkioq_flush(d.q, &d, 0);
    int ret = reap_ret(d.q, &d);
    CHECK(ret == 0 || (options.poll && ret == -ENOTSUP));
    close_device(&d);
    d = open_device();
    CHECK_EQ(do_read(&d, 512 * KIB, d.buf, 64 * KIB), 0);
    CHECK_EQ(first_difference(d.buf, 64 * KIB, 77), -1);
    close_device(&d);
}

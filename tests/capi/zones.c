/* Zoned devices: report, states, the write pointer. Zones below are emptied first. */
#define _GNU_SOURCE
#include "device.h"
#include "harness.h"

enum { MOST_ZONES = 1024 };

static struct blkio_zone zones[MOST_ZONES];

static uint64_t zone_size(struct device *d)
{
    return get_uint64(d->b, "zone_size");
}

static int report(struct device *d, uint64_t offset, uint32_t count)
{
    memset(zones, 0x5a, sizeof zones);
    blkioq_report_zones(d->q, offset, zones, count, d, 0);
    return reap_ret(d->q, d);
}

static int state_of(struct device *d, uint64_t start)
{
    CHECK_EQ(report(d, start, 1), 1);
    CHECK_EQ(zones[0].start, start);
    return zones[0].zone_state;
}

typedef void manage(struct blkioq *q, uint64_t offset, void *user_data, uint32_t flags);
typedef void manage_all(struct blkioq *q, void *user_data, uint32_t flags);

static int change(struct device *d, manage *function, uint64_t offset)
{
    function(d->q, offset, d, 0);
    return reap_ret(d->q, d);
}

static int change_all(struct device *d, manage_all *function)
{
    function(d->q, d, 0);
    return reap_ret(d->q, d);
}

/* A device with all zones empty. */
static struct device open_zoned(void)
{
    struct device d = open_device();
    if (!has_property(d.b, "zoned") || get_int(d.b, "zoned") == 0)
        SKIP("not a zoned device");
    CHECK_EQ(change_all(&d, blkioq_reset_all_zones), 0);
    return d;
}

TEST(the_report_tells_of_every_zone, WRITES | ZONED)
{
    struct device d = open_zoned();
    uint64_t count = get_uint64(d.b, "nr_zones"), size = zone_size(&d);
    CHECK(count > 0 && size > 0 && count * size >= d.capacity);
    if (count >= MOST_ZONES)
        SKIP("%ju zones are too many", (uintmax_t)count);
    CHECK_EQ(report(&d, 0, (uint32_t)count + 1), count);
    for (uint64_t i = 0; i < count; i++) {
        CHECK_EQ(zones[i].start, i * size);
        CHECK_EQ(zones[i].len, size);
        CHECK(zones[i].capacity > 0 && zones[i].capacity <= size);
        CHECK_EQ(zones[i].zone_type, BLKIO_ZONE_TYPE_SEQWRITE_REQ);
        CHECK_EQ(zones[i].zone_state, BLKIO_ZONE_STATE_EMPTY);
        CHECK_EQ(zones[i].write_pointer, zones[i].start);
    }
    CHECK_EQ(((unsigned char *)&zones[count])[0], 0x5a); /* untouched */
    close_device(&d);
}

TEST(the_report_starts_at_the_zone_of_the_offset, WRITES | ZONED)
{
    struct device d = open_zoned();
    uint64_t count = get_uint64(d.b, "nr_zones"), size = zone_size(&d);
    CHECK_EQ(report(&d, size + d.unit, 1), 1);
    CHECK_EQ(zones[0].start, size);
    CHECK_EQ(((unsigned char *)&zones[1])[0], 0x5a);
    CHECK_EQ(report(&d, (count - 1) * size, 8), 1);
    CHECK_EQ(zones[0].start, (count - 1) * size);
    CHECK(report(&d, count * size, 1) <= 0);
    close_device(&d);
}

TEST(a_zone_goes_through_its_states, WRITES | ZONED)
{
    struct device d = open_zoned();
    CHECK_EQ(change(&d, blkioq_open_zone, 0), 0);
    CHECK_EQ(state_of(&d, 0), BLKIO_ZONE_STATE_EXP_OPEN);
    CHECK_EQ(do_write(&d, 0, d.buf, d.unit), 0);
    CHECK_EQ(state_of(&d, 0), BLKIO_ZONE_STATE_EXP_OPEN);
    CHECK_EQ(zones[0].write_pointer, d.unit);
    CHECK_EQ(change(&d, blkioq_close_zone, 0), 0);
    CHECK_EQ(state_of(&d, 0), BLKIO_ZONE_STATE_CLOSED);
    CHECK_EQ(do_write(&d, d.unit, d.buf, d.unit), 0);
    CHECK_EQ(state_of(&d, 0), BLKIO_ZONE_STATE_IMP_OPEN);
    CHECK_EQ(zones[0].write_pointer, 2 * d.unit);
    CHECK_EQ(change(&d, blkioq_finish_zone, 0), 0);
    CHECK_EQ(state_of(&d, 0), BLKIO_ZONE_STATE_FULL);
    CHECK(do_write(&d, 2 * d.unit, d.buf, d.unit) < 0);
    CHECK_EQ(change(&d, blkioq_reset_zone, 0), 0);
    CHECK_EQ(state_of(&d, 0), BLKIO_ZONE_STATE_EMPTY);
    CHECK_EQ(zones[0].write_pointer, 0);
    CHECK_EQ(do_write(&d, 0, d.buf, d.unit), 0);
    close_device(&d);
}

TEST(writes_go_to_the_write_pointer_only, WRITES | ZONED)
{
    struct device d = open_zoned();
    uint64_t start = zone_size(&d);
    fill(d.buf, 4 * d.unit, 31);
    CHECK(do_write(&d, start + d.unit, d.buf, d.unit) < 0);
    CHECK_EQ(state_of(&d, start), BLKIO_ZONE_STATE_EMPTY);
    CHECK_EQ(do_write(&d, start, d.buf, 4 * d.unit), 0);
    CHECK(do_write(&d, start, d.buf, d.unit) < 0);
    CHECK_EQ(state_of(&d, start), BLKIO_ZONE_STATE_IMP_OPEN);
    CHECK_EQ(zones[0].write_pointer, start + 4 * d.unit);
    memset(d.buf, 0, 4 * d.unit);
    CHECK_EQ(do_read(&d, start, d.buf, 4 * d.unit), 0);
    CHECK_EQ(first_difference(d.buf, 4 * d.unit, 31), -1);
    close_device(&d);
}

TEST(all_zones_change_where_their_state_allows_it, WRITES | ZONED)
{
    struct device d = open_zoned();
    uint64_t size = zone_size(&d);
    for (uint64_t i = 0; i < 2; i++)
        CHECK_EQ(do_write(&d, i * size, d.buf, d.unit), 0);
    static manage_all *const functions[] = {blkioq_close_all_zones, blkioq_open_all_zones, blkioq_finish_all_zones,
                                            blkioq_reset_all_zones};
    static const int states[] = {BLKIO_ZONE_STATE_CLOSED, BLKIO_ZONE_STATE_EXP_OPEN, BLKIO_ZONE_STATE_FULL,
                                 BLKIO_ZONE_STATE_EMPTY};
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(change_all(&d, functions[i]), 0);
        CHECK_EQ(state_of(&d, 0), states[i]);
        CHECK_EQ(state_of(&d, size), states[i]);
        CHECK_EQ(state_of(&d, 2 * size), BLKIO_ZONE_STATE_EMPTY);
    }
    close_device(&d);
}

TEST(no_more_than_max_open_zones_are_open, WRITES | ZONED)
{
    struct device d = open_zoned();
    int most = get_int(d.b, "max_open_zones");
    CHECK(get_int(d.b, "max_active_zones") == 0 || get_int(d.b, "max_active_zones") >= most);
    if (most == 0 || (uint64_t)most >= get_uint64(d.b, "nr_zones"))
        SKIP("max_open_zones is %d", most);
    for (int i = 0; i < most; i++)
        CHECK_EQ(change(&d, blkioq_open_zone, (uint64_t)i * zone_size(&d)), 0);
    uint64_t next = (uint64_t)most * zone_size(&d);
    CHECK(change(&d, blkioq_open_zone, next) < 0);
    CHECK_EQ(change(&d, blkioq_reset_zone, 0), 0);
    CHECK_EQ(change(&d, blkioq_open_zone, next), 0);
    CHECK_EQ(change_all(&d, blkioq_reset_all_zones), 0);
    close_device(&d);
}

TEST(an_offset_that_is_no_zone_fails, WRITES | ZONED)
{
    struct device d = open_zoned();
    uint64_t end = get_uint64(d.b, "nr_zones") * zone_size(&d);
    static manage *const functions[] = {blkioq_open_zone, blkioq_close_zone, blkioq_finish_zone, blkioq_reset_zone};
    for (int i = 0; i < 4; i++) {
        CHECK(change(&d, functions[i], end) < 0);
        CHECK(change(&d, functions[i], UINT64_MAX) < 0);
    }
    CHECK_EQ(change(&d, blkioq_reset_zone, 0), 0);
    close_device(&d);
}

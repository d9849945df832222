/* Properties: type, access, default, conversion. The table is the one of the manual page. */
#define _GNU_SOURCE
#include "device.h"
#include "harness.h"

#include <limits.h>

enum type { BOOL, INT, UINT64, STR };
enum access { READ, READ_AT_ONCE, SET_CREATED, SET_CONNECTED }; /* READ_AT_ONCE: in created, too */

static const struct property {
    const char *name, *first; /* as text when created; NULL: whatever it is */
    enum type type;
    enum access access;
    bool everywhere;
} properties[] = {
    {"can-add-queues", NULL, BOOL, READ_AT_ONCE, true},
    {"driver", NULL, STR, READ_AT_ONCE, true},
    {"read-only", "false", BOOL, SET_CREATED, true},
    {"capacity", NULL, UINT64, READ, true},
    {"max-queues", NULL, INT, READ, true},
    {"num-queues", "1", INT, SET_CONNECTED, true},
    {"num-poll-queues", "0", INT, SET_CONNECTED, true},
    {"supports-poll-queues", NULL, BOOL, READ, true},
    {"max-mem-regions", NULL, UINT64, READ, true},
    {"may-pin-mem-regions", NULL, BOOL, READ, true},
    {"mem-region-alignment", NULL, UINT64, READ, true},
    {"needs-mem-regions", NULL, BOOL, READ, true},
    {"needs-mem-region-fd", NULL, BOOL, READ, true},
    {"optimal-io-alignment", NULL, INT, READ, true},
    {"optimal-io-size", NULL, INT, READ, true},
    {"request-alignment", NULL, INT, READ, true},
    {"flush-needed", NULL, BOOL, READ, true},
    {"buf-alignment", NULL, INT, READ, true},
    {"can-grow", NULL, BOOL, READ, true},
    {"max-segments", NULL, INT, READ, true},
    {"max-segment-len", NULL, INT, READ, true},
    {"max-transfer", NULL, INT, READ, true},
    {"optimal-buf-alignment", NULL, INT, READ, true},
    {"supports-fua-natively", NULL, BOOL, READ, true},
    {"max-write-zeroes-len", NULL, UINT64, READ, true},
    {"discard-alignment", NULL, INT, READ, true},
    {"discard-alignment-offset", NULL, INT, READ, true},
    {"max-discard-len", NULL, UINT64, READ, true},
    /* of some drivers */
    {"direct", "false", BOOL, SET_CREATED, false},
    {"fd", "-1", INT, SET_CREATED, false},
    {"path", "", STR, SET_CREATED, false},
    {"num-entries", "128", INT, SET_CONNECTED, false},
    {"queue-size", "256", INT, SET_CONNECTED, false},
    {"max-queue-size", NULL, INT, READ, false},
};
enum { NUM_PROPERTIES = sizeof properties / sizeof *properties };

static bool applies(struct blkio *b, const struct property *p)
{
    /* All virtio-blk drivers of libblkio have "fd", but only vhost-vdpa takes one. */
    if (strcmp(p->name, "fd") == 0 && strncmp(options.driver, "virtio-blk-v", 12) == 0 &&
        strcmp(options.driver, "virtio-blk-vhost-vdpa") != 0)
        return false;
    if (p->everywhere || has_property(b, p->name))
        return true;
    if (strcmp(options.driver, "io_uring") == 0)
        CHECK(strstr(p->name, "queue-size") != NULL);
    return false;
}

union value {
    bool flag;
    int number;
    uint64_t length;
    char *text;
};

static int get(struct blkio *b, const char *name, enum type type, union value *value)
{
    switch (type) {
    case BOOL: return blkio_get_bool(b, name, &value->flag);
    case INT: return blkio_get_int(b, name, &value->number);
    case UINT64: return blkio_get_uint64(b, name, &value->length);
    default: return blkio_get_str(b, name, &value->text);
    }
}

static int set_to_what_it_is(struct blkio *b, const struct property *p, const union value *value)
{
    switch (p->type) {
    case BOOL: return blkio_set_bool(b, p->name, value->flag);
    case INT: return blkio_set_int(b, p->name, value->number);
    case UINT64: return blkio_set_uint64(b, p->name, value->length);
    default: return blkio_set_str(b, p->name, value->text);
    }
}

#define FAIL_FOR(p, ret, expected)                                                                     \
    FAIL("%s: %s, expected %s; message: %s", (p)->name, words(ret), expected, blkio_get_error_msg())

#define FOR_EACH_PROPERTY(p, b)                                                     \
    for (const struct property *p = properties; p < properties + NUM_PROPERTIES; p++) \
        if (applies(b, p))

static struct blkio *in_state(int state)
{
    return state == 0 ? created() : state == 1 ? connected() : started();
}

#define FOR_EACH_STATE(state, b)                                                                    \
    for (int state = 0; state < 3; state++)                                                         \
        for (struct blkio *b = in_state(state); b; blkio_destroy(&b))

TEST(each_property_has_its_documented_type, 0)
{
    FOR_EACH_STATE(state, b) {
        FOR_EACH_PROPERTY(p, b) {
            for (enum type type = BOOL; type <= UINT64; type++) {
                union value value;
                int ret = get(b, p->name, type, &value);
                if (type != p->type && ret != -ENOTTY)
                    FAIL_FOR(p, ret, "ENOTTY when read as another type");
                if (type == p->type && ret == -ENOTTY)
                    FAIL_FOR(p, ret, "a value");
            }
            int rets[] = {blkio_set_bool(b, p->name, true), blkio_set_int(b, p->name, 1),
                          blkio_set_uint64(b, p->name, 1)};
            for (enum type type = BOOL; type <= UINT64; type++)
                if (type != p->type && rets[type] != -ENOTTY)
                    FAIL_FOR(p, rets[type], "ENOTTY when set as another type");
        }
    }
}

TEST(each_property_is_readable_once_connected, 0)
{
    FOR_EACH_STATE(state, b) {
        FOR_EACH_PROPERTY(p, b) {
            union value value = {0};
            int ret = get(b, p->name, p->type, &value);
            bool late = p->access == READ || p->access == SET_CONNECTED;
            if (ret != 0 && !(state == 0 && late && ret == -ENODEV))
                FAIL_FOR(p, ret, "a value");
            if (ret == 0 && p->type == STR)
                free(value.text);
        }
    }
}

TEST(properties_of_the_device_are_enodev_before_connect, 0)
{
    struct blkio *b = created();
    uint64_t length;
    CHECK_RET(blkio_get_uint64(b, "capacity", &length), -ENODEV);
    char *text;
    CHECK_RET(blkio_get_str(b, "capacity", &text), -ENODEV);
    blkio_destroy(&b);
}

TEST(a_property_for_reading_is_eacces_in_every_state, 0)
{
    FOR_EACH_STATE(state, b) {
        FOR_EACH_PROPERTY(p, b) {
            if (p->access != READ && p->access != READ_AT_ONCE)
                continue;
            union value value = {0};
            if (p->type == STR)
                value.text = (char *)"x";
            int ret = set_to_what_it_is(b, p, &value);
            if (ret != -EACCES)
                FAIL_FOR(p, ret, "EACCES");
            ret = blkio_set_str(b, p->name, p->type == BOOL ? "true" : "1");
            if (ret != -EACCES)
                FAIL_FOR(p, ret, "EACCES as text");
        }
    }
}

TEST(connection_details_are_set_before_connect_and_ebusy_after, 0)
{
    FOR_EACH_STATE(state, b) {
        FOR_EACH_PROPERTY(p, b) {
            union value value = {0};
            if (p->access != SET_CREATED)
                continue;
            int ret = get(b, p->name, p->type, &value);
            if (ret != 0)
                FAIL_FOR(p, ret, "a value");
            ret = set_to_what_it_is(b, p, &value);
            if (ret != (state == 0 ? 0 : -EBUSY))
                FAIL_FOR(p, ret, state == 0 ? "0" : "EBUSY");
            if (p->type == STR)
                free(value.text);
        }
    }
}

TEST(operation_is_configured_between_connect_and_start, 0)
{
    static const int expected[] = {-ENODEV, 0, -EBUSY};
    FOR_EACH_STATE(state, b) {
        FOR_EACH_PROPERTY(p, b) {
            union value value = {.number = 1};
            if (p->access != SET_CONNECTED)
                continue;
            if (state > 0)
                CHECK_RET(get(b, p->name, p->type, &value), 0);
            int ret = set_to_what_it_is(b, p, &value);
            if (ret != expected[state])
                FAIL_FOR(p, ret, words(expected[state]));
        }
    }
}

TEST(defaults_are_the_documented_ones, 0)
{
    struct blkio *b = NULL;
    char *text;
    CHECK_RET(blkio_create(options.driver, &b), 0);
    FOR_EACH_PROPERTY(p, b) {
        if (!p->first || p->access != SET_CREATED)
            continue;
        CHECK_RET(blkio_get_str(b, p->name, &text), 0);
        if (strcmp(text, p->first) != 0)
            FAIL("%s is \"%s\" at first, expected \"%s\"", p->name, text, p->first);
        free(text);
    }
    blkio_destroy(&b);
    b = connected();
    FOR_EACH_PROPERTY(p, b) {
        if (!p->first || p->access != SET_CONNECTED)
            continue;
        CHECK_RET(blkio_get_str(b, p->name, &text), 0);
        if (strcmp(text, p->first) != 0)
            FAIL("%s is \"%s\" after connect, expected \"%s\"", p->name, text, p->first);
        free(text);
    }
    blkio_destroy(&b);
}

TEST(a_string_is_given_for_every_type, 0)
{
    struct blkio *b = connected();
    FOR_EACH_PROPERTY(p, b) {
        union value value;
        char *text = NULL, expected[64];
        CHECK_RET(get(b, p->name, p->type, &value), 0);
        CHECK_RET(blkio_get_str(b, p->name, &text), 0);
        CHECK(text != NULL);
        switch (p->type) {
        case BOOL: snprintf(expected, sizeof expected, "%s", value.flag ? "true" : "false"); break;
        case INT: snprintf(expected, sizeof expected, "%d", value.number); break;
        case UINT64: snprintf(expected, sizeof expected, "%ju", (uintmax_t)value.length); break;
        default: snprintf(expected, sizeof expected, "%.60s", value.text); free(value.text);
        }
        if (strncmp(text, expected, 60) != 0)
            FAIL("%s is \"%s\" as text, expected \"%s\"", p->name, text, expected);
        free(text);
    }
    blkio_destroy(&b);
}

TEST(a_bool_is_set_from_true_and_false_only, 0)
{
    struct blkio *b = created();
    static const char *const wrong[] = {"", "1", "0", "yes", "no", "True", "FALSE", "true ", " false", "on", "\xff"};
    CHECK_RET(blkio_set_str(b, "read-only", "true"), 0);
    CHECK_EQ(get_bool(b, "read-only"), true);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK_RET(blkio_set_str(b, "read-only", wrong[i]), -EINVAL);
        CHECK_EQ(get_bool(b, "read-only"), true);
    }
    CHECK_RET(blkio_set_str(b, "read-only", "false"), 0);
    CHECK_EQ(get_bool(b, "read-only"), false);
    blkio_destroy(&b);
}

TEST(an_int_is_set_from_a_decimal_number_only, 0)
{
    static const char *const wrong[] = {"", " 1", "1 ", "2x", "x", "0x1", "1.0", "1e3", "99999999999", "-99999999999",
                                        "2147483648", "--1", "one", "1,000"};
    struct blkio *b = connected();
    CHECK_RET(blkio_set_str(b, "num-queues", "3"), 0);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK_RET(blkio_set_str(b, "num-queues", wrong[i]), -EINVAL);
        CHECK_EQ(get_int(b, "num-queues"), 3);
    }
    CHECK_RET(blkio_set_str(b, "num-queues", "+1"), 0);
    CHECK_EQ(get_int(b, "num-queues"), 1);
    CHECK_RET(blkio_set_str(b, "num-queues", "02"), 0);
    CHECK_EQ(get_int(b, "num-queues"), 2);
    blkio_destroy(&b);
}

TEST(text_that_is_no_value_is_einval_in_every_state, 0)
{
    FOR_EACH_STATE(state, b) {
        CHECK_RET(blkio_set_str(b, "num-queues", "2x"), -EINVAL);
        CHECK_RET(blkio_set_str(b, "read-only", "maybe"), -EINVAL);
    }
}

TEST(an_unknown_property_is_enoent_in_every_state, 0)
{
    static const char *const names[] = {"no-such-property", "", "READ-ONLY", "read-only ", "read", "num"};
    FOR_EACH_STATE(state, b) {
        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
            union value value;
            for (enum type type = BOOL; type <= STR; type++)
                CHECK_RET(get(b, names[i], type, &value), -ENOENT);
            CHECK_RET(blkio_set_bool(b, names[i], true), -ENOENT);
            CHECK_RET(blkio_set_int(b, names[i], 1), -ENOENT);
            CHECK_RET(blkio_set_uint64(b, names[i], 1), -ENOENT);
            CHECK_RET(blkio_set_str(b, names[i], "1"), -ENOENT);
        }
    }
}

TEST(a_name_or_value_that_is_no_text_is_einval, 0)
{
    struct blkio *b = created();
    bool flag;
    CHECK_RET(blkio_get_bool(b, "\xff", &flag), -EINVAL);
    CHECK_RET(blkio_set_bool(b, "\xff", true), -EINVAL);
    if (setting("path"))
        CHECK_RET(blkio_set_str(b, "path", "\xff\xfe"), -EINVAL);
    blkio_destroy(&b);
}

TEST(driver_is_the_name_given_to_create, 0)
{
    FOR_EACH_STATE(state, b) {
        char *text;
        CHECK_RET(blkio_get_str(b, "driver", &text), 0);
        CHECK_EQ(strcmp(text, options.driver), 0);
        free(text);
    }
}

TEST(settings_stay_through_connect_and_start, 0)
{
    FOR_EACH_STATE(state, b) {
        char *text;
        for (int i = 0; i < options.num_settings; i++) {
            CHECK_RET(blkio_get_str(b, options.settings[i].name, &text), 0);
            CHECK_EQ(strcmp(text, options.settings[i].value), 0);
            free(text);
        }
    }
}

TEST(capacity_is_what_the_device_has, 0)
{
    struct blkio *b = connected();
    if (!options.capacity)
        SKIP("no --capacity");
    CHECK_EQ(get_uint64(b, "capacity"), options.capacity);
    blkio_destroy(&b);
}

#define IS_MULTIPLE(b, name, of)                                                                     \
    do {                                                                                             \
        long a_ = get_int(b, name), o_ = get_int(b, of);                                             \
        if (o_ <= 0 || a_ % o_ != 0)                                                                 \
            FAIL("\"%s\" is %ld, which is no multiple of \"%s\", %ld", name, a_, of, o_);            \
    } while (0)

TEST(properties_agree_with_each_other, 0)
{
    struct blkio *b = connected();
    IS_MULTIPLE(b, "optimal-io-alignment", "request-alignment");
    if (get_int(b, "optimal-io-size") != 0)
        IS_MULTIPLE(b, "optimal-io-size", "optimal-io-alignment");
    if (get_int(b, "discard-alignment") != 0)
        IS_MULTIPLE(b, "discard-alignment", "request-alignment");
    if (get_int(b, "discard-alignment-offset") != 0) {
        IS_MULTIPLE(b, "discard-alignment-offset", "request-alignment");
        CHECK(get_int(b, "discard-alignment-offset") < get_int(b, "discard-alignment"));
    }
    IS_MULTIPLE(b, "optimal-buf-alignment", "buf-alignment");
    CHECK_EQ(get_uint64(b, "mem-region-alignment") % (uint64_t)get_int(b, "buf-alignment"), 0);
    CHECK(get_int(b, "max-queues") >= 1);
    CHECK(get_uint64(b, "max-mem-regions") >= 1);
    CHECK(get_int(b, "max-segments") >= 1);
    CHECK(get_int(b, "max-segment-len") >= 0);
    CHECK(get_int(b, "max-transfer") >= 0);
    if (has_property(b, "queue-size"))
        CHECK(get_int(b, "queue-size") <= get_int(b, "max-queue-size"));
    blkio_destroy(&b);
}

TEST(values_do_not_change_with_start, 0)
{
    struct blkio *b = connected();
    char *before[NUM_PROPERTIES] = {NULL}, *after;
    FOR_EACH_PROPERTY(p, b)
        CHECK_RET(blkio_get_str(b, p->name, &before[p - properties]), 0);
    CHECK_RET(blkio_start(b), 0);
    FOR_EACH_PROPERTY(p, b) {
        CHECK_RET(blkio_get_str(b, p->name, &after), 0);
        if (strcmp(before[p - properties], after) != 0)
            FAIL("\"%s\" was \"%s\", is \"%s\" after start", p->name, before[p - properties], after);
        free(before[p - properties]);
        free(after);
    }
    blkio_destroy(&b);
}

TEST(numbers_of_queues_are_not_negative, 0)
{
    struct blkio *b = connected();
    CHECK_RET(blkio_set_int(b, "num-queues", -1), -EINVAL);
    CHECK_RET(blkio_set_int(b, "num-queues", INT_MIN), -EINVAL);
    CHECK_RET(blkio_set_int(b, "num-poll-queues", -1), -EINVAL);
    CHECK_EQ(get_int(b, "num-queues"), 1);
    CHECK_EQ(get_int(b, "num-poll-queues"), 0);
    blkio_destroy(&b);
}

TEST(more_queues_than_max_queues_are_einval_and_can_be_mended, 0)
{
    struct blkio *b = connected();
    int most = get_int(b, "max-queues");
    if (most == INT_MAX)
        SKIP("max-queues is without limit");
    int ret = blkio_set_int(b, "num-queues", most + 1);
    if (ret == 0)
        ret = blkio_start(b);
    CHECK_EQ(ret, -EINVAL);
    CHECK_RET(blkio_set_int(b, "num-queues", 1), 0);
    CHECK_RET(blkio_start(b), 0);
    blkio_destroy(&b);
}

TEST(num_entries_is_above_zero_and_within_the_kernels_limit, FILES)
{
    struct blkio *b = connected();
    CHECK_RET(blkio_set_int(b, "num-entries", 0), -EINVAL);
    CHECK_RET(blkio_set_int(b, "num-entries", -1), -EINVAL);
    CHECK_EQ(get_int(b, "num-entries"), 128);
    int ret = blkio_set_int(b, "num-entries", 40000);
    if (ret == 0)
        ret = blkio_start(b);
    CHECK_EQ(ret, -EINVAL);
    CHECK_RET(blkio_set_int(b, "num-entries", 100), 0);
    CHECK_RET(blkio_start(b), 0);
    CHECK_EQ(get_int(b, "num-entries"), 100);
    blkio_destroy(&b);
}

TEST(queue_size_is_a_power_of_two_within_the_devices_limit, 0)
{
    struct blkio *b = connected();
    if (!has_property(b, "queue-size"))
        SKIP("no queue-size");
    static const int wrong[] = {0, -1, INT_MIN, 3, 100, 65536, INT_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CHECK_RET(blkio_set_int(b, "queue-size", wrong[i]), -EINVAL);
    CHECK_EQ(get_int(b, "queue-size"), 256);
    CHECK_RET(blkio_set_int(b, "queue-size", 64), 0);
    CHECK_RET(blkio_start(b), 0);
    CHECK_EQ(get_int(b, "queue-size"), 64);
    blkio_destroy(&b);
}

/* Instances: create, connect, start, destroy; error messages. */
#define _GNU_SOURCE
#include "device.h"
#include "harness.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

TEST(an_unknown_driver_is_enoent, 0)
{
    struct blkio *b = NULL;
    CHECK_RET(blkio_create("no-such-driver", &b), -ENOENT);
    CHECK(b == NULL);
    CHECK(*blkio_get_error_msg());
    CHECK_RET(blkio_create("", &b), -ENOENT);
    CHECK(b == NULL);
}

TEST(a_driver_name_that_is_no_text_fails, 0)
{
    struct blkio *b = NULL;
    CHECK_FAILS(blkio_create("\xff\xfe", &b));
    CHECK(b == NULL);
}

TEST(create_without_a_place_for_the_instance_is_einval, 0)
{
    CHECK_RET(blkio_create(options.driver, NULL), -EINVAL);
}

TEST(null_arguments_are_einval, STRICT)
{
    struct blkio *b = created();
    struct blkio *other = NULL;
    bool flag;
    char *text;
    CHECK_RET(blkio_create(NULL, &other), -EINVAL);
    CHECK_RET(blkio_connect(NULL), -EINVAL);
    CHECK_RET(blkio_start(NULL), -EINVAL);
    CHECK_RET(blkio_get_bool(NULL, "read-only", &flag), -EINVAL);
    CHECK_RET(blkio_get_bool(b, NULL, &flag), -EINVAL);
    CHECK_RET(blkio_get_bool(b, "read-only", NULL), -EINVAL);
    CHECK_RET(blkio_get_str(b, "driver", NULL), -EINVAL);
    CHECK_RET(blkio_get_str(b, NULL, &text), -EINVAL);
    CHECK_RET(blkio_set_str(b, "path", NULL), -EINVAL);
    CHECK_RET(blkio_set_str(NULL, "path", "x"), -EINVAL);
    CHECK_RET(blkio_map_mem_region(b, NULL), -EINVAL);
    CHECK_RET(blkio_alloc_mem_region(b, NULL, 4096), -EINVAL);
    CHECK(blkio_get_queue(NULL, 0) == NULL);
    blkio_destroy(&b);
}

TEST(destroy_sets_the_pointer_to_null, 0)
{
    struct blkio *b = NULL;
    CHECK_RET(blkio_create(options.driver, &b), 0);
    blkio_destroy(&b);
    CHECK(b == NULL);
    blkio_destroy(NULL);
}

TEST(destroy_of_no_instance_does_nothing, STRICT)
{
    struct blkio *b = NULL;
    blkio_destroy(&b);
    CHECK(b == NULL);
}

/* What the library keeps for good (a probe, a thread pool) is there after the first round. */
TEST(destroy_in_any_state_gives_descriptors_and_mappings_back, 0)
{
    int fds = 0, mappings = 0;
    for (int round = 0; round < 4; round++) {
        struct blkio *b = created();
        blkio_destroy(&b);
        b = connected();
        blkio_destroy(&b);
        b = started();
        blkio_destroy(&b);
        struct device d = open_device();
        struct blkio_mem_region second;
        CHECK_RET(blkio_alloc_mem_region(d.b, &second, 64 * KIB), 0);
        CHECK_EQ(do_read(&d, 0, d.buf, d.unit), 0);
        blkio_destroy(&d.b); /* with one region mapped and both allocated */
        if (round == 0) {
            fds = count_open_fds();
            mappings = count_mappings();
        }
    }
    CHECK(open_fds_return_to(fds));
    CHECK_EQ(count_mappings(), mappings);
}

TEST(instances_live_side_by_side, 0)
{
    struct blkio *b[8];
    for (int i = 0; i < 8; i++) {
        b[i] = created();
        CHECK_RET(blkio_set_bool(b[i], "read-only", i % 2), 0);
    }
    for (int i = 0; i < 8; i++)
        CHECK_EQ(get_bool(b[i], "read-only"), i % 2);
    for (int i = 0; i < 8; i++)
        blkio_destroy(&b[i]);
}

TEST(start_before_connect_is_enodev, 0)
{
    struct blkio *b = created();
    CHECK_RET(blkio_start(b), -ENODEV);
    CHECK_RET(blkio_connect(b), 0);
    CHECK_RET(blkio_start(b), 0);
    blkio_destroy(&b);
}

TEST(connect_again_does_nothing_until_started_and_is_ebusy_then, 0)
{
    struct blkio *b = connected();
    CHECK_RET(blkio_connect(b), 0);
    CHECK_RET(blkio_start(b), 0);
    CHECK_RET(blkio_connect(b), -EBUSY);
    blkio_destroy(&b);
}

TEST(start_again_does_nothing, 0)
{
    struct device d = open_device();
    CHECK_RET(blkio_start(d.b), 0);
    CHECK_EQ(do_read(&d, 0, d.buf, d.unit), 0);
    close_device(&d);
}

TEST(connect_without_a_device_is_einval_and_can_be_mended, 0)
{
    struct blkio *b = NULL;
    if (!setting("path"))
        SKIP("for drivers with a path");
    CHECK_RET(blkio_create(options.driver, &b), 0);
    CHECK_RET(blkio_connect(b), -EINVAL);
    CHECK(*blkio_get_error_msg());
    for (int i = 0; i < options.num_settings; i++)
        CHECK_RET(blkio_set_str(b, options.settings[i].name, options.settings[i].value), 0);
    CHECK_RET(blkio_connect(b), 0);
    blkio_destroy(&b);
}

TEST(a_path_that_does_not_exist_is_enoent_and_can_be_mended, 0)
{
    if (!has_path())
        SKIP("for drivers with a path");
    struct blkio *b = created();
    CHECK_RET(blkio_set_str(b, "path", "/nonexistent/device"), 0);
    CHECK_RET(blkio_connect(b), -ENOENT);
    CHECK_RET(blkio_set_str(b, "path", setting("path")), 0);
    CHECK_RET(blkio_connect(b), 0);
    blkio_destroy(&b);
}

TEST(a_path_of_the_wrong_kind_fails, 0)
{
    if (!has_path())
        SKIP("for drivers with a path");
    struct blkio *b = created();
    CHECK_RET(blkio_set_str(b, "path", "/dev"), 0);
    CHECK_FAILS(blkio_connect(b));
    CHECK_RET(blkio_set_str(b, "path", "/dev/null"), 0);
    CHECK_FAILS(blkio_connect(b));
    blkio_destroy(&b);
}

TEST(path_and_fd_together_are_einval, FILES)
{
    struct blkio *b = created();
    int fd = open(setting("path"), O_RDONLY | O_CLOEXEC);
    CHECK_RET(blkio_set_int(b, "fd", fd), 0);
    CHECK_RET(blkio_connect(b), -EINVAL);
    blkio_destroy(&b);
    CHECK_EQ(close(fd), 0);
}

TEST(a_closed_fd_is_ebadf, FILES)
{
    struct blkio *b = created();
    CHECK_RET(blkio_set_str(b, "path", ""), 0);
    CHECK_RET(blkio_set_int(b, "fd", 987), 0);
    CHECK_RET(blkio_connect(b), -EBADF);
    blkio_destroy(&b);
}

TEST(connect_takes_the_fd_over, FILES)
{
    struct blkio *b = created();
    int fd = open(setting("path"), O_RDWR | O_CLOEXEC);
    CHECK_RET(blkio_set_str(b, "path", ""), 0);
    CHECK_RET(blkio_set_int(b, "fd", fd), 0);
    CHECK_RET(blkio_set_bool(b, "read-only", true), 0);
    CHECK_RET(blkio_connect(b), 0);
    CHECK_EQ(get_int(b, "fd"), fd);
    CHECK_EQ(get_bool(b, "read-only"), false);
    blkio_destroy(&b);
    CHECK_EQ(fcntl(fd, F_GETFD), -1);
}

TEST(properties_follow_the_flags_of_the_fd, FILES)
{
    struct blkio *b = created();
    int fd = open(setting("path"), O_RDONLY | O_CLOEXEC);
    CHECK_RET(blkio_set_str(b, "path", ""), 0);
    CHECK_RET(blkio_set_int(b, "fd", fd), 0);
    CHECK_RET(blkio_set_bool(b, "read-only", false), 0);
    CHECK_RET(blkio_set_bool(b, "direct", true), 0);
    CHECK_RET(blkio_connect(b), 0);
    CHECK_EQ(get_bool(b, "read-only"), true);
    CHECK_EQ(get_bool(b, "direct"), false);
    blkio_destroy(&b);
}

/* libblkio 1.5.0 closes the caller's descriptor. */
TEST(a_failed_connect_leaves_the_fd_to_the_caller, FILES | STRICT)
{
    struct blkio *b = created();
    int fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    CHECK_RET(blkio_set_str(b, "path", ""), 0);
    CHECK_RET(blkio_set_int(b, "fd", fd), 0);
    CHECK_RET(blkio_connect(b), -EINVAL);
    blkio_destroy(&b);
    CHECK_EQ(close(fd), 0);
}

TEST(connect_by_path_gives_the_fd, FILES)
{
    struct stat by_fd, by_path;
    struct blkio *b = created();
    CHECK_EQ(get_int(b, "fd"), -1);
    CHECK_RET(blkio_connect(b), 0);
    CHECK_EQ(fstat(get_int(b, "fd"), &by_fd), 0);
    CHECK_EQ(stat(setting("path"), &by_path), 0);
    CHECK_EQ(by_fd.st_ino, by_path.st_ino);
    blkio_destroy(&b);
}

TEST(direct_opens_with_o_direct, FILES)
{
    struct blkio *b = created();
    CHECK_RET(blkio_set_bool(b, "direct", true), 0);
    CHECK_RET(blkio_connect(b), 0);
    CHECK_EQ(get_bool(b, "direct"), true);
    CHECK(fcntl(get_int(b, "fd"), F_GETFL) & O_DIRECT);
    blkio_destroy(&b);
}

/* The message */

enum { MOST_MESSAGE = 1024 }; /* libblkio cuts at 255 bytes */

TEST(the_message_is_empty_before_the_first_error_and_stays_in_its_place, 0)
{
    struct blkio *b = NULL;
    const char *message = blkio_get_error_msg();
    CHECK(message != NULL);
    CHECK_EQ(*message, 0);
    CHECK_FAILS(blkio_create("no-such-driver", &b));
    CHECK(blkio_get_error_msg() == message);
}

static void *fail_in_another_thread(void *unused)
{
    struct blkio *b = created();
    CHECK_EQ(*blkio_get_error_msg(), 0);
    CHECK_RET(blkio_set_str(b, "read-only", "maybe"), -EINVAL);
    CHECK(*blkio_get_error_msg());
    blkio_destroy(&b);
    return unused;
}

TEST(messages_belong_to_their_thread, 0)
{
    struct blkio *b = NULL;
    pthread_t thread;
    char before[512];
    CHECK_FAILS(blkio_create("no-such-driver", &b));
    snprintf(before, sizeof before, "%s", blkio_get_error_msg());
    CHECK_EQ(pthread_create(&thread, NULL, fail_in_another_thread, NULL), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(strcmp(before, blkio_get_error_msg()), 0);
}

TEST(an_endless_name_makes_no_endless_message, 0)
{
    static char name[100000];
    struct blkio *b = NULL;
    memset(name, 'n', sizeof name - 1);
    CHECK_RET(blkio_create(name, &b), -ENOENT);
    CHECK(strlen(blkio_get_error_msg()) < MOST_MESSAGE);
    b = created();
    CHECK_RET(blkio_set_int(b, name, 1), -ENOENT);
    CHECK(strlen(blkio_get_error_msg()) < MOST_MESSAGE);
    blkio_destroy(&b);
}

const char *blkio_get_error_msg_(void);
void blkio_set_error_msg_(const char *message, size_t len);

/* Not in blkio.h, but among the symbols of libblkio 1.5. */
TEST(the_inner_message_functions_cut_what_is_too_long, 0)
{
    char text[4096];
    memset(text, 'a', sizeof text);
    CHECK(blkio_get_error_msg_() == blkio_get_error_msg());
    blkio_set_error_msg_("hello world", 5);
    CHECK_EQ(strcmp(blkio_get_error_msg(), "hello"), 0);
    blkio_set_error_msg_(text, sizeof text);
    CHECK(strlen(blkio_get_error_msg()) >= 255 && strlen(blkio_get_error_msg()) < MOST_MESSAGE);
    blkio_set_error_msg_(text, 0);
    CHECK_EQ(*blkio_get_error_msg(), 0);
}

#define CHECK_NAMES(call, word)                                                                          \
    do {                                                                                                 \
        CHECK_FAILS(call);                                                                               \
        if (!strstr(blkio_get_error_msg(), word))                                                        \
            FAIL("%s: the message does not name %s: %s", #call, word, blkio_get_error_msg());            \
    } while (0)

TEST(messages_name_the_object_and_the_value, STRICT)
{
    struct blkio *b = NULL;
    CHECK_NAMES(blkio_create("no-such-driver", &b), "no-such-driver");
    b = created();
    CHECK_NAMES(blkio_set_int(b, "no-such-property", 1), "no-such-property");
    CHECK_NAMES(blkio_set_str(b, "read-only", "maybe"), "maybe");
    CHECK_NAMES(blkio_set_str(b, "read-only", "maybe"), "read-only");
    CHECK_NAMES(blkio_set_int(b, "read-only", 1), "read-only");
    CHECK_NAMES(blkio_set_uint64(b, "capacity", 1), "capacity");
    CHECK_NAMES(blkio_set_int(b, "num-queues", 1), "num-queues");
    if (has_path()) {
        CHECK_RET(blkio_set_str(b, "path", "/nonexistent/device"), 0);
        CHECK_NAMES(blkio_connect(b), "/nonexistent/device");
        CHECK_RET(blkio_set_str(b, "path", setting("path")), 0);
    }
    CHECK_RET(blkio_connect(b), 0);
    CHECK_NAMES(blkio_set_bool(b, "read-only", true), "read-only");
    CHECK_NAMES(blkio_set_int(b, "num-queues", -7), "-7");
    blkio_destroy(&b);
}

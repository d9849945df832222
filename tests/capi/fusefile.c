/*
 * fusefile MOUNTPOINT SIZE: a file in memory, mounted over the file MOUNTPOINT. Gives a driver for files a server that can
 * be stopped. Needs root and /dev/fuse; ends when it is unmounted or killed. The protocol is that of linux/fuse.h; the
 * file system has one node, its root.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MESSAGE = 1 << 20, MAX_DATA = MESSAGE - 4096 };

static int fuse_fd;
static char *content;
static uint64_t file_size, room;

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static void reply(uint64_t unique, int error, const void *body, size_t len)
{
    struct fuse_out_header header = {.len = (uint32_t)(sizeof header + len), .error = error, .unique = unique};
    struct iovec iovec[2] = {{&header, sizeof header}, {(void *)body, len}};
    if (writev(fuse_fd, iovec, 2) < 0 && errno != ENOENT)
        die("fusefile: reply");
}

static struct fuse_attr attributes(void)
{
    return (struct fuse_attr){.ino = FUSE_ROOT_ID, .size = file_size, .blocks = file_size / 512,
                              .mode = S_IFREG | 0600, .nlink = 1, .blksize = 4096};
}

static void serve_read(const struct fuse_in_header *in, const struct fuse_read_in *args)
{
    uint64_t offset = args->offset < file_size ? args->offset : file_size;
    uint64_t len = args->size < file_size - offset ? args->size : file_size - offset;
    reply(in->unique, 0, content + offset, len);
}

static void serve_write(const struct fuse_in_header *in, const struct fuse_write_in *args)
{
    struct fuse_write_out out = {.size = args->size};
    if (args->offset + args->size > room) {
        reply(in->unique, -ENOSPC, NULL, 0);
        return;
    }
    memcpy(content + args->offset, args + 1, args->size);
    if (args->offset + args->size > file_size)
        file_size = args->offset + args->size;
    reply(in->unique, 0, &out, sizeof out);
}

static void serve_fallocate(const struct fuse_in_header *in, const struct fuse_fallocate_in *args)
{
    bool keep = args->mode & FALLOC_FL_KEEP_SIZE;
    if (args->offset > room || args->length > room - args->offset) {
        reply(in->unique, -ENOSPC, NULL, 0);
        return;
    }
    if (args->mode & (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_ZERO_RANGE))
        memset(content + args->offset, 0, args->length);
    if (!keep && args->offset + args->length > file_size)
        file_size = args->offset + args->length;
    reply(in->unique, 0, NULL, 0);
}

static void serve_init(const struct fuse_in_header *in, const struct fuse_init_in *args)
{
    struct fuse_init_out out = {.major = FUSE_KERNEL_VERSION, .minor = FUSE_KERNEL_MINOR_VERSION,
                                .max_readahead = args->max_readahead, .max_write = MAX_DATA, .max_background = 64,
                                .congestion_threshold = 48, .max_pages = MAX_DATA / 4096,
                                .flags = FUSE_MAX_PAGES | FUSE_BIG_WRITES | FUSE_ASYNC_READ | FUSE_ATOMIC_O_TRUNC};
    reply(in->unique, 0, &out, sizeof out);
}

static void serve(const struct fuse_in_header *in)
{
    const void *args = in + 1;
    struct fuse_attr_out attr = {.attr_valid = 0, .attr = attributes()};
    struct fuse_open_out open = {.open_flags = 0};
    switch (in->opcode) {
    case FUSE_INIT: serve_init(in, args); break;
    case FUSE_GETATTR: reply(in->unique, 0, &attr, sizeof attr); break;
    case FUSE_SETATTR:
        if (((const struct fuse_setattr_in *)args)->valid & FATTR_SIZE) {
            uint64_t size = ((const struct fuse_setattr_in *)args)->size;
            if (size < file_size)
                memset(content + size, 0, file_size - size);
            file_size = size < room ? size : room;
        }
        attr.attr = attributes();
        reply(in->unique, 0, &attr, sizeof attr);
        break;
    case FUSE_OPEN: reply(in->unique, 0, &open, sizeof open); break;
    case FUSE_READ: serve_read(in, args); break;
    case FUSE_WRITE: serve_write(in, args); break;
    case FUSE_FALLOCATE: serve_fallocate(in, args); break;
    case FUSE_FLUSH:
    case FUSE_FSYNC:
    case FUSE_RELEASE: reply(in->unique, 0, NULL, 0); break;
    case FUSE_INTERRUPT:
    case FUSE_FORGET:
    case FUSE_BATCH_FORGET: break; /* want no answer */
    case FUSE_STATFS: {
        struct fuse_statfs_out out = {.st = {.bsize = 4096, .frsize = 4096, .namelen = 255}};
        reply(in->unique, 0, &out, sizeof out);
        break;
    }
    default: reply(in->unique, -ENOSYS, NULL, 0);
    }
}

int main(int argc, char **argv)
{
    char options[128];
    static char message[MESSAGE];
    if (argc != 3) {
        fprintf(stderr, "usage: fusefile MOUNTPOINT SIZE\n");
        return 2;
    }
    file_size = strtoull(argv[2], NULL, 10);
    room = 4 * file_size;
    content = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (content == MAP_FAILED)
        die("fusefile: memory");
    fuse_fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    if (fuse_fd < 0)
        die("fusefile: /dev/fuse");
    snprintf(options, sizeof options, "fd=%d,rootmode=100000,user_id=%d,group_id=%d", fuse_fd, getuid(), getgid());
    if (mount("fusefile", argv[1], "fuse", MS_NOSUID | MS_NODEV, options) < 0)
        die("fusefile: mount");
    for (;;) {
        ssize_t len = read(fuse_fd, message, sizeof message);
        if (len < 0 && errno == ENODEV)
            return 0;
        if (len < 0 && errno != EINTR && errno != ENOENT && errno != EAGAIN)
            die("fusefile: read");
        if (len >= (ssize_t)sizeof(struct fuse_in_header))
            serve((const struct fuse_in_header *)message);
    }
}

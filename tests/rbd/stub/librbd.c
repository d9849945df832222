/* A stand-in for librbd and librados: a cluster that is a directory, for tests without Ceph.
 *
 * The directory is that of the configuration file (conf=, or CEPH_CONF). In it are
 *
 *   POOL/[NAMESPACE/]IMAGE[@SNAPSHOT]    data of an image
 *   POOL/[NAMESPACE/]IMAGE.lock          address of the client that has its exclusive lock
 *   blocklist.PID                        the cluster refuses this process
 *   errno, delay_us, refuse              numbers: operations fail so, take so long, do not start
 *
 * so that several processes use one cluster. Operations end on threads of an image, in any order.
 * Compiled with -DOLD the library lacks a function. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { THREADS = 3, OBJECT_SIZE = 4 << 20, FEATURE_EXCLUSIVE_LOCK = 1 << 2, WATCH_PERIOD_US = 2000 };

struct cluster {
    char directory[PATH_MAX];
    bool is_cached;
};

struct pool {
    struct cluster *cluster;
    char directory[PATH_MAX];
    char namespace[NAME_MAX];
};

typedef void (*callback)(void *completion, void *argument);

enum kind { READ, WRITE, ZERO, FLUSH };

struct completion {
    callback ended;
    void *argument;
    struct image *image;
    ssize_t result;
    enum kind kind;
    const struct iovec *list; /* of a read: the caller's own */
    int count;
    char *data; /* of a write */
    uint64_t offset, len;
    struct completion *next;
};

struct image {
    struct cluster *cluster;
    char path[PATH_MAX + 2 * NAME_MAX];
    int fd;
    bool is_read_only, has_lock, is_closing;
    pthread_mutex_t mutex;
    pthread_cond_t pushed;
    struct completion *first;
    pthread_t threads[THREADS];
    /* A watch of the size. */
    pthread_t watcher;
    bool is_watched;
    /* Read before the watch answers: a change after that is reported, however late the thread starts. */
    uint64_t size_at_watch;
    void (*changed)(void *);
    void *changed_argument;
};

static const char *suffixed(char *text, const char *path, const char *suffix)
{
    snprintf(text, 2 * PATH_MAX, "%s%s", path, suffix);
    return text;
}

/* The number in a file of the cluster; 0 without the file. */
static long knob(const struct cluster *cluster, const char *name)
{
    char path[2 * PATH_MAX], text[32] = "";
    snprintf(path, sizeof path, "%s/%s", cluster->directory, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t len = read(fd, text, sizeof text - 1);
    close(fd);
    return len > 0 ? atol(text) : 0;
}

static bool is_blocklisted(const struct cluster *cluster)
{
    char path[2 * PATH_MAX];
    snprintf(path, sizeof path, "%s/blocklist.%d", cluster->directory, getpid());
    return access(path, F_OK) == 0;
}

/* Clusters and pools. */

int rados_create2(void **cluster, const char *name, const char *user, uint64_t flags)
{
    (void)name, (void)user, (void)flags;
    *cluster = calloc(1, sizeof(struct cluster));
    return *cluster ? 0 : -ENOMEM;
}

int rados_conf_read_file(void *raw, const char *path)
{
    struct cluster *cluster = raw;
    path = path ? path : getenv("CEPH_CONF");
    if (!path || access(path, R_OK) != 0)
        return -ENOENT;
    snprintf(cluster->directory, sizeof cluster->directory, "%s", path);
    char *slash = strrchr(cluster->directory, '/');
    if (!slash)
        return -EINVAL;
    *slash = 0;
    return 0;
}

int rados_conf_set(void *raw, const char *option, const char *value)
{
    if (strcmp(option, "rbd_cache") == 0)
        ((struct cluster *)raw)->is_cached = strcmp(value, "true") == 0;
    return 0;
}

int rados_connect(void *raw)
{
    return is_blocklisted(raw) ? -ESHUTDOWN : 0;
}

void rados_shutdown(void *raw)
{
    free(raw);
}

int rados_ioctx_create(void *raw, const char *name, void **result)
{
    struct pool *pool = calloc(1, sizeof *pool);
    struct stat status;
    pool->cluster = raw;
    snprintf(pool->directory, sizeof pool->directory, "%.3000s/%s", pool->cluster->directory, name);
    if (stat(pool->directory, &status) != 0 || !S_ISDIR(status.st_mode)) {
        free(pool);
        return -ENOENT;
    }
    *result = pool;
    return 0;
}

void rados_ioctx_set_namespace(void *raw, const char *name)
{
    struct pool *pool = raw;
    snprintf(pool->namespace, sizeof pool->namespace, "%s", name);
}

void rados_ioctx_destroy(void *raw)
{
    free(raw);
}

/* Writes the names of a directory's entries of one kind, each with a zero after it. Returns their length. */
static int list(const char *directory, bool are_directories, char *names, size_t size)
{
    size_t len = 0;
    DIR *dir = opendir(directory);
    if (!dir)
        return -errno;
    for (struct dirent *entry; (entry = readdir(dir));) {
        bool is_directory = entry->d_type == DT_DIR;
        if (entry->d_name[0] == '.' || is_directory != are_directories || strpbrk(entry->d_name, "@.") != NULL)
            continue;
        size_t more = strlen(entry->d_name) + 1;
        if (len + more <= size)
            memcpy(names + len, entry->d_name, more);
        len += more;
    }
    closedir(dir);
    return (int)len;
}

int rados_pool_list(void *raw, char *names, size_t size)
{
    int len = list(((struct cluster *)raw)->directory, true, names, size);
    if (len >= 0 && (size_t)len < size)
        names[len] = 0;
    return len < 0 ? len : len + 1;
}

static int list_again(const char *directory, bool are_directories, char *names, size_t *size)
{
    int len = list(directory, are_directories, names, *size);
    bool is_short = len >= 0 && (size_t)len > *size;
    if (len >= 0)
        *size = (size_t)len;
    return is_short ? -ERANGE : len;
}

static void directory_of(const struct pool *pool, char *directory, size_t size)
{
    snprintf(directory, size, "%s/%s", pool->directory, pool->namespace);
}

int rbd_namespace_list(void *raw, char *names, size_t *size)
{
    return list_again(((struct pool *)raw)->directory, true, names, size);
}

int rbd_list(void *raw, char *names, size_t *size)
{
    char directory[2 * PATH_MAX];
    directory_of(raw, directory, sizeof directory);
    return list_again(directory, false, names, size);
}

int rbd_create(void *raw, const char *name, uint64_t size, int *order)
{
    char directory[2 * PATH_MAX], path[3 * PATH_MAX];
    directory_of(raw, directory, sizeof directory);
    snprintf(path, sizeof path, "%s/%s", directory, name);
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return -errno;
    int result = ftruncate(fd, (off_t)size) == 0 ? 0 : -errno;
    close(fd);
    *order = 22;
    return result;
}

/* Operations. */

static ssize_t zero(struct image *image, uint64_t offset, uint64_t len)
{
    static const char zeroes[1 << 16];
    while (len > 0) {
        ssize_t part = pwrite(image->fd, zeroes, len < sizeof zeroes ? len : sizeof zeroes, (off_t)offset);
        if (part < 0)
            return -errno;
        offset += (uint64_t)part, len -= (uint64_t)part;
    }
    return 0;
}

static ssize_t carry_out(struct image *image, const struct completion *c)
{
    ssize_t len = 0;
    long error = knob(image->cluster, "errno");
    if (is_blocklisted(image->cluster))
        return -ESHUTDOWN;
    if (error)
        return -error;
    switch (c->kind) {
    case READ:
        for (int i = 0; i < c->count; i++) {
            ssize_t part = pread(image->fd, c->list[i].iov_base, c->list[i].iov_len, (off_t)c->offset + len);
            if (part < 0)
                return -errno;
            len += part;
        }
        return len;
    case WRITE:
        return pwrite(image->fd, c->data, c->len, (off_t)c->offset) < 0 ? -errno : 0;
    case ZERO: return zero(image, c->offset, c->len);
    default: return fdatasync(image->fd) == 0 ? 0 : -errno;
    }
}

static void *serve(void *raw)
{
    struct image *image = raw;
    for (unsigned round = 0;; round++) {
        pthread_mutex_lock(&image->mutex);
        while (!image->first && !image->is_closing)
            pthread_cond_wait(&image->pushed, &image->mutex);
        struct completion *c = image->first;
        if (c)
            image->first = c->next;
        pthread_mutex_unlock(&image->mutex);
        if (!c)
            return NULL;
        long delay_us = knob(image->cluster, "delay_us");
        if (delay_us || round % 7 == 3)
            usleep((useconds_t)delay_us + 20 * (round % 5)); /* others overtake it */
        c->result = carry_out(image, c);
        free(c->data);
        c->ended(c, c->argument);
    }
}

int rbd_aio_create_completion(void *argument, callback ended, void **result)
{
    struct completion *c = calloc(1, sizeof *c);
    c->argument = argument;
    c->ended = ended;
    *result = c;
    return 0;
}

ssize_t rbd_aio_get_return_value(void *raw)
{
    return ((struct completion *)raw)->result;
}

void rbd_aio_release(void *raw)
{
    free(raw);
}

/* The newest operation is the first to be taken. */
static int start(struct image *image, struct completion *c)
{
    long error = knob(image->cluster, "refuse");
    if (!error && image->is_read_only && c->kind != READ && c->kind != FLUSH)
        error = EROFS;
    if (error) {
        free(c->data);
        return (int)-error;
    }
    pthread_mutex_lock(&image->mutex);
    c->next = image->first;
    image->first = c;
    pthread_cond_signal(&image->pushed);
    pthread_mutex_unlock(&image->mutex);
    return 0;
}

int rbd_aio_readv(void *image, const struct iovec *list, int count, uint64_t offset, void *raw)
{
    struct completion *c = raw;
    c->kind = READ, c->list = list, c->count = count, c->offset = offset;
    return start(image, c);
}

int rbd_aio_writev(void *image, const struct iovec *list, int count, uint64_t offset, void *raw)
{
    struct completion *c = raw;
    c->kind = WRITE, c->offset = offset;
    for (int i = 0; i < count; i++)
        c->len += list[i].iov_len;
    c->data = malloc(c->len ? c->len : 1);
    char *end = c->data;
    for (int i = 0; i < count; i++)
        end = mempcpy(end, list[i].iov_base, list[i].iov_len);
    return start(image, c);
}

int rbd_aio_discard(void *image, uint64_t offset, uint64_t len, void *raw)
{
    struct completion *c = raw;
    c->kind = ZERO, c->offset = offset, c->len = len;
    return start(image, c);
}

#ifndef OLD
int rbd_aio_write_zeroes(void *image, uint64_t offset, size_t len, void *raw, int zero_flags, int op_flags)
{
    (void)zero_flags, (void)op_flags;
    return rbd_aio_discard(image, offset, len, raw);
}
#endif

int rbd_aio_flush(void *image, void *raw)
{
    ((struct completion *)raw)->kind = FLUSH;
    return start(image, raw);
}

/* Images. */

static int open_image(struct pool *pool, const char *name, void **result, const char *snapshot, bool is_read_only)
{
    char directory[2 * PATH_MAX];
    struct image *image = calloc(1, sizeof *image);
    directory_of(pool, directory, sizeof directory);
    snprintf(image->path, sizeof image->path, "%.4000s/%s%s%s", directory, name, snapshot ? "@" : "",
             snapshot ? snapshot : "");
    image->cluster = pool->cluster;
    image->is_read_only = is_read_only;
    image->fd = open(image->path, (is_read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC);
    if (image->fd < 0) {
        free(image);
        return -errno;
    }
    pthread_mutex_init(&image->mutex, NULL);
    pthread_cond_init(&image->pushed, NULL);
    for (int i = 0; i < THREADS; i++)
        pthread_create(&image->threads[i], NULL, serve, image);
    *result = image;
    return 0;
}

int rbd_open(void *pool, const char *name, void **image, const char *snapshot)
{
    return open_image(pool, name, image, snapshot, false);
}

int rbd_open_read_only(void *pool, const char *name, void **image, const char *snapshot)
{
    return open_image(pool, name, image, snapshot, true);
}

static bool owner_of(const struct image *image, char *owner, size_t size)
{
    char path[2 * PATH_MAX];
    int fd = open(suffixed(path, image->path, ".lock"), O_RDONLY | O_CLOEXEC);
    ssize_t len = fd < 0 ? 0 : read(fd, owner, size - 1);
    if (fd >= 0)
        close(fd);
    owner[len > 0 ? len : 0] = 0;
    return len > 0;
}

static void own_address(char *address, size_t size)
{
    snprintf(address, size, "127.0.0.1:0/%d", getpid());
}

int rbd_close(void *raw)
{
    struct image *image = raw;
    char path[2 * PATH_MAX], owner[64], own[64];
    pthread_mutex_lock(&image->mutex);
    image->is_closing = true;
    pthread_cond_broadcast(&image->pushed);
    pthread_mutex_unlock(&image->mutex);
    for (int i = 0; i < THREADS; i++)
        pthread_join(image->threads[i], NULL);
    own_address(own, sizeof own);
    if (image->has_lock && owner_of(image, owner, sizeof owner) && strcmp(owner, own) == 0)
        unlink(suffixed(path, image->path, ".lock"));
    close(image->fd);
    free(image);
    return 0;
}

int rbd_get_size(void *image, uint64_t *size)
{
    struct stat status;
    if (fstat(((struct image *)image)->fd, &status) != 0)
        return -errno;
    *size = (uint64_t)status.st_size;
    return 0;
}

struct info {
    uint64_t size, object_size, object_count;
    int order;
    char block_name_prefix[24];
    int64_t parent_pool;
    char parent_name[96];
};

int rbd_stat(void *image, struct info *info, size_t len)
{
    if (len != sizeof *info)
        return -EINVAL;
    info->object_size = OBJECT_SIZE;
    return rbd_get_size(image, &info->size);
}

int rbd_get_features(void *image, uint64_t *features)
{
    (void)image;
    *features = FEATURE_EXCLUSIVE_LOCK;
    return 0;
}

int rbd_resize2(void *raw, uint64_t size, bool may_shrink, int (*progress)(uint64_t, uint64_t, void *), void *argument)
{
    struct image *image = raw;
    uint64_t before;
    if (rbd_get_size(image, &before) < 0 || (size < before && !may_shrink))
        return -EINVAL;
    progress(1, 1, argument);
    return ftruncate(image->fd, (off_t)size) == 0 ? 0 : -errno;
}

struct config_option {
    char *name, *value;
    int source;
};

int rbd_config_image_list(void *image, struct config_option *list, int *count)
{
    bool is_cached = ((struct image *)image)->cluster->is_cached;
    if (*count < 1) {
        *count = 1;
        return -ERANGE;
    }
    *list = (struct config_option){strdup("rbd_cache"), strdup(is_cached ? "true" : "false"), 0};
    *count = 1;
    return 0;
}

void rbd_config_image_list_cleanup(struct config_option *list, int count)
{
    for (int i = 0; i < count; i++) {
        free(list[i].name);
        free(list[i].value);
    }
}

static void *watch(void *raw)
{
    struct image *image = raw;
    uint64_t before = image->size_at_watch, now;
    while (__atomic_load_n(&image->is_watched, __ATOMIC_SEQ_CST)) {
        usleep(WATCH_PERIOD_US);
        if (rbd_get_size(image, &now) == 0 && now != before) {
            before = now;
            image->changed(image->changed_argument);
        }
    }
    return NULL;
}

int rbd_update_watch(void *raw, uint64_t *handle, void (*changed)(void *), void *argument)
{
    struct image *image = raw;
    int result = rbd_get_size(image, &image->size_at_watch);
    if (result < 0)
        return result;
    image->changed = changed;
    image->changed_argument = argument;
    image->is_watched = true;
    *handle = 1;
    return -pthread_create(&image->watcher, NULL, watch, image);
}

int rbd_update_unwatch(void *raw, uint64_t handle)
{
    struct image *image = raw;
    if (handle != 1 || !image->is_watched)
        return -EINVAL;
    __atomic_store_n(&image->is_watched, false, __ATOMIC_SEQ_CST);
    return -pthread_join(image->watcher, NULL);
}

/* The exclusive lock. */

int rbd_lock_acquire(void *raw, int mode)
{
    struct image *image = raw;
    char path[2 * PATH_MAX], own[64];
    if (mode != 0)
        return -EOPNOTSUPP;
    int fd = open(suffixed(path, image->path, ".lock"), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return errno == EEXIST ? -EROFS : -errno;
    own_address(own, sizeof own);
    ssize_t len = write(fd, own, strlen(own));
    close(fd);
    image->has_lock = len > 0;
    return image->has_lock ? 0 : -EIO;
}

int rbd_lock_get_owners(void *image, int *mode, char **owners, size_t *count)
{
    char owner[64];
    if (!owner_of(image, owner, sizeof owner))
        return -ENOENT;
    if (*count < 1)
        return -ERANGE;
    *mode = 0;
    *owners = strdup(owner);
    *count = 1;
    return 0;
}

void rbd_lock_get_owners_cleanup(char **owners, size_t count)
{
    for (size_t i = 0; i < count; i++)
        free(owners[i]);
}

struct watcher { /* rbd_image_watcher_t */
    char *address;
    int64_t id;
    uint64_t cookie;
};

/* The watch of a client with the lock does not expire. */
int rbd_watchers_list(void *image, struct watcher *watchers, size_t *max)
{
    char owner[64];
    if (*max < 1)
        return -ERANGE;
    *max = owner_of(image, owner, sizeof owner);
    if (*max)
        watchers[0] = (struct watcher){.address = strdup(owner)};
    return 0;
}

void rbd_watchers_list_cleanup(struct watcher *watchers, size_t count)
{
    for (size_t i = 0; i < count; i++)
        free(watchers[i].address);
}

int rbd_lock_break(void *raw, int mode, const char *owner)
{
    struct image *image = raw;
    char path[2 * PATH_MAX], present[64];
    const char *slash = strrchr(owner, '/');
    if (mode != 0 || !slash)
        return -EINVAL;
    if (!owner_of(image, present, sizeof present) || strcmp(present, owner) != 0)
        return -ENOENT;
    snprintf(path, sizeof path, "%s/blocklist.%s", image->cluster->directory, slash + 1);
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return -errno;
    close(fd);
    return unlink(suffixed(path, image->path, ".lock")) == 0 ? 0 : -errno;
}

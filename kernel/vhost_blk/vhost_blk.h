/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * vhost_blk: virtio-blk served by the host's kernel from a block device.
 *
 *   kick eventfd -> vhost worker -> ring.c: takes descriptor chains
 *                                -> request.c: parses them, submits bios
 *   end of a bio -> ring.c: the worker completes, publishes, signals
 *
 * main.c has the device node and its ioctls, changes.c the bitmap of changed
 * blocks, map.c the map of what is served in place, punt.c what is not. Virtio 1.2, section 5.2.
 */
#ifndef _VHOST_BLK_H
#define _VHOST_BLK_H

#include <linux/bio.h>
#include <linux/blkdev.h>
#include <linux/list.h>
#include <linux/llist.h>
#include <linux/poll.h>
#include <linux/virtio_blk.h>
#include <linux/workqueue.h>
#include <linux/vhost_blk.h>

#include "vhost.h"

/* Longest read or write; firmware reads a whole kernel with one request. */
#define VHOST_BLK_MAX_BYTES	SZ_1G
/* A ring takes no more requests while those in flight have so much memory. */
#define VHOST_BLK_MAX_MEMORY	SZ_64M
/* Longest device that an extent map describes, in sectors. */
#define VHOST_BLK_MAX_CAPACITY	BIT_ULL(54)
/* Most ranges of a discard or write zeroes request. */
#define VHOST_BLK_MAX_RANGES	256
/* A request with no more pages needs no array of its own. */
#define VHOST_BLK_INLINE_PAGES	4

/* The user serves the request. */
#define VHOST_BLK_PUNTED	1

struct vhost_blk_bitmap;
struct vhost_blk_table;

/**
 * struct vhost_blk_req - a request in flight; one for each head of a ring
 * @done: in the queue's list of requests whose last bio has ended
 * @node: in the list of punted, given or held requests
 * @queue: the queue it belongs to
 * @number: requests of the ring before it, since the ring was started
 * @started: when it was taken, for a trace; 0 when there was none
 * @sector: from its header
 * @bytes: length of its data; of its list of ranges for a discard
 * @type: from its header; all ones before that is read
 * @head: its head in the descriptor table; only valid while @busy
 * @busy: between the take from the ring and the publication as used
 * @bounced: the pages are ours, not the guest's
 * @is_read: the pages are written by the device
 * @flush_after: a flush follows before the request is complete
 * @is_given: the user has read its head
 * @is_change: it was sent to the disk, which it may have changed
 * @pending: bios that have not ended, and one while they are submitted
 * @error: 0, or the first error as -errno
 * @data_bytes: bytes that move when there is no error
 * @writable: bytes that the device may write, the status included
 * @used: bytes that it has written
 * @status: where the guest wants the status byte
 * @pages: the data's pages
 * @nr_pages: how many
 * @memory: bytes that were allocated for them
 * @inline_pages: @pages of a short request
 * @iter: where the data of a bounced read goes
 * @iov: the array behind @iter
 * @ranges: of a discard or write zeroes, else NULL
 * @nr_ranges: how many
 * @log: guest memory to mark as dirty
 * @log_num: entries of @log
 */
struct vhost_blk_req {
	struct llist_node done;
	struct list_head node;
	struct vhost_blk_queue *queue;
	u32 number;
	u64 started;
	u64 sector;
	u64 bytes;
	u32 type;
	u16 head;
	bool busy;
	bool bounced;
	bool is_read;
	bool flush_after;
	bool is_given;
	bool is_change;
	atomic_t pending;
	int error;
	u32 data_bytes;
	u32 used;
	size_t writable;
	u8 __user *status;
	struct bio_vec *pages;
	unsigned int nr_pages;
	size_t memory;
	struct bio_vec inline_pages[VHOST_BLK_INLINE_PAGES];
	struct iov_iter iter;
	const void *iov;
	struct virtio_blk_discard_write_zeroes *ranges;
	unsigned int nr_ranges;
	struct vhost_log *log;
	unsigned int log_num;
};

/**
 * struct vhost_blk_queue - a ring
 * @vq: vhost's part; its backend is the device while the ring runs
 * @blk: the device
 * @reqs: a request for each head, while the ring runs
 * @nr_reqs: entries of @reqs
 * @taken: requests since the ring was started
 * @unpublished: requests in the three lists that follow
 * @punted: requests for the user, whose heads it has not read
 * @given: requests whose heads the user has read
 * @held: requests that have ended behind one that is punted
 * @is_broken: the ring was invalid; nothing is taken until it is stopped
 * @is_full: nothing is taken until requests have given memory back
 * @memory: that of all requests; protected by the mutex of @vq
 * @changes: where changes are marked, or NULL; protected by the mutex of @vq
 * @done_work: completes @done_list in the ring's worker
 * @fallback: does the same when the worker is dead
 * @done_list: requests whose last bio has ended
 * @inflight: requests that the kernel has taken, and neither punted nor ended
 * @stats: counters, protected by the mutex of @vq
 */
struct vhost_blk_queue {
	struct vhost_virtqueue vq;
	struct vhost_blk *blk;
	struct vhost_blk_req *reqs;
	unsigned int nr_reqs;
	u32 taken;
	unsigned int unpublished;
	struct list_head punted;
	struct list_head given;
	struct list_head held;
	bool is_broken;
	bool is_full;
	size_t memory;
	struct vhost_blk_bitmap *changes;
	struct vhost_work done_work;
	struct work_struct fallback;
	struct llist_head done_list;
	atomic_t inflight;
	struct vhost_blk_stats stats;
};

/**
 * struct vhost_blk - an open /dev/vhost-blk
 * @dev: vhost's part; its mutex serializes ioctls
 * @disk: the block device, held exclusively, or NULL
 * @is_disk_read_only: it was attached read-only
 * @config: what VHOST_BLK_SET_CONFIG has set; changes while no ring runs
 * @changes: that of each queue
 * @table: the extent map, or NULL; changes while no ring takes requests
 * @nr_punted: requests whose heads the user has not read
 * @has_punted: woken when there are some
 * @drained: woken when a queue has nothing in flight
 * @nr_queues: entries of @queues
 * @queues: the rings
 */
struct vhost_blk {
	struct vhost_dev dev;
	struct file *disk;
	bool is_disk_read_only;
	struct vhost_blk_config config;
	struct vhost_blk_bitmap *changes;
	struct vhost_blk_table *table;
	atomic_t nr_punted;
	wait_queue_head_t has_punted;
	wait_queue_head_t drained;
	unsigned int nr_queues;
	struct vhost_blk_queue queues[] __counted_by(nr_queues);
};

static inline bool vhost_blk_is_read_only(const struct vhost_blk *blk)
{
	return blk->is_disk_read_only ||
	       blk->config.flags & VHOST_BLK_CONFIG_READ_ONLY;
}

static inline struct vhost_blk_queue *
vhost_blk_queue_of(struct vhost_virtqueue *vq)
{
	return container_of(vq, struct vhost_blk_queue, vq);
}

static inline struct block_device *vhost_blk_disk(const struct vhost_blk *blk)
{
	return file_bdev(blk->disk);
}

static inline unsigned int
vhost_blk_queue_index(const struct vhost_blk_queue *queue)
{
	return queue - queue->blk->queues;
}

extern struct workqueue_struct *vhost_blk_wq;

/* main.c */
struct vhost_blk_queue *vhost_blk_find_queue(struct vhost_blk *blk, u32 index);
void vhost_blk_pause(struct vhost_blk *blk);
void vhost_blk_resume(struct vhost_blk *blk);

/* ring.c */
void vhost_blk_init_queue(struct vhost_blk *blk, struct vhost_blk_queue *queue);
int vhost_blk_start_queue(struct vhost_blk_queue *queue);
void vhost_blk_pause_queue(struct vhost_blk_queue *queue);
void vhost_blk_resume_queue(struct vhost_blk_queue *queue);
void vhost_blk_stop_queue(struct vhost_blk_queue *queue);
void vhost_blk_put_req(struct vhost_blk_req *req);
void vhost_blk_complete_punted(struct vhost_blk_req *req, u32 used);

/* request.c */
int vhost_blk_submit(struct vhost_blk_req *req, unsigned int out,
		     unsigned int in);
void vhost_blk_submit_flush(struct vhost_blk_req *req);
int vhost_blk_release_data(struct vhost_blk_req *req);

/* changes.c */
long vhost_blk_set_changes(struct vhost_blk *blk,
			   const struct vhost_blk_changes *arg);
long vhost_blk_stop_changes(struct vhost_blk *blk);
bool vhost_blk_can_mark(const struct vhost_blk_queue *queue, u64 end);
void vhost_blk_mark_changes(struct vhost_blk_req *req);

/* map.c */
u64 vhost_blk_capacity(const struct vhost_blk *blk);
int vhost_blk_locate(const struct vhost_blk *blk, u64 sector, u64 count,
		     u32 right, u64 *at);
bool vhost_blk_punts_flushes(const struct vhost_blk *blk);
long vhost_blk_set_map(struct vhost_blk *blk, const struct vhost_blk_map *arg);
long vhost_blk_stop_map(struct vhost_blk *blk);

/* punt.c */
bool vhost_blk_is_held_back(const struct vhost_blk_req *req);
void vhost_blk_punt(struct vhost_blk_req *req);
void vhost_blk_abandon(struct vhost_blk_queue *queue);
ssize_t vhost_blk_read(struct file *file, char __user *buffer, size_t size,
		       loff_t *pos);
ssize_t vhost_blk_write(struct file *file, const char __user *buffer,
			size_t size, loff_t *pos);
__poll_t vhost_blk_poll(struct file *file, poll_table *wait);

#endif

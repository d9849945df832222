// SPDX-License-Identifier: GPL-2.0-only
/*
 * Changed blocks: a bitmap in the user's memory, in which each request that
 * may have changed the disk is marked before it is published.
 *
 * A mark is set when the request has ended, not when it begins: a program
 * that clears a mark, and reads the block after that, either sees what was
 * written, or finds the mark once more.
 */
#include <linux/highmem.h>
#include <linux/mm.h>
#include <linux/uaccess.h>

#include "vhost_blk.h"

#define BITS_PER_PAGE	(PAGE_SIZE * BITS_PER_BYTE)

/**
 * struct vhost_blk_bitmap - marks for the blocks of a disk
 * @shift: a bit is for this power of two of sectors
 * @bits: how many there are
 * @nr_pages: entries of @pages
 * @pages: the user's pages, pinned
 */
struct vhost_blk_bitmap {
	unsigned int shift;
	u64 bits;
	unsigned long nr_pages;
	struct page *pages[] __counted_by(nr_pages);
};

static void set_marks(struct vhost_blk_bitmap *map, u64 first, u64 end)
{
	while (first < end) {
		unsigned long bit = first % BITS_PER_PAGE;
		unsigned long last = min_t(u64, end - first + bit, BITS_PER_PAGE);
		unsigned long *words =
			kmap_local_page(map->pages[first / BITS_PER_PAGE]);

		first += last - bit;
		while (bit < last) {
			/* The user may clear bits of the word meanwhile. */
			if (bit % BITS_PER_LONG || last - bit < BITS_PER_LONG) {
				set_bit_le(bit++, words);
				continue;
			}
			WRITE_ONCE(words[bit / BITS_PER_LONG], ~0UL);
			bit += BITS_PER_LONG;
		}
		kunmap_local(words);
	}
}

static void mark_range(struct vhost_blk_bitmap *map, u64 sector, u64 sectors)
{
	if (!sectors)
		return;
	/* A request is older than a map that is too short for it. */
	set_marks(map, sector >> map->shift,
		  min(((sector + sectors - 1) >> map->shift) + 1, map->bits));
}

/**
 * vhost_blk_mark_changes - mark what a request may have changed
 * @req: a request that has ended, with the ring's mutex held
 */
void vhost_blk_mark_changes(struct vhost_blk_req *req)
{
	struct vhost_blk_bitmap *map = req->queue->changes;
	unsigned int i;

	if (!map || !req->is_change)
		return;
	if (!req->ranges)
		mark_range(map, req->sector, req->bytes >> SECTOR_SHIFT);
	for (i = 0; i < req->nr_ranges; i++)
		mark_range(map, le64_to_cpu(req->ranges[i].sector),
			   le32_to_cpu(req->ranges[i].num_sectors));
}

/**
 * vhost_blk_can_mark - whether a request has its bits
 * @queue: its ring, with the mutex held
 * @end: the sector behind it
 *
 * Return: false when the disk is longer than the bitmap that is set.
 */
bool vhost_blk_can_mark(const struct vhost_blk_queue *queue, u64 end)
{
	const struct vhost_blk_bitmap *map = queue->changes;

	return !map || !end || (end - 1) >> map->shift < map->bits;
}

static void free_bitmap(struct vhost_blk *blk, struct vhost_blk_bitmap *map,
			unsigned long pinned)
{
	unpin_user_pages_dirty_lock(map->pages, pinned, true);
	account_locked_vm(blk->dev.mm, map->nr_pages, false);
	kvfree(map);
}

static struct vhost_blk_bitmap *pin_bitmap(struct vhost_blk *blk,
					   const struct vhost_blk_changes *arg)
{
	unsigned long nr_pages = DIV_ROUND_UP(arg->bytes, PAGE_SIZE);
	struct vhost_blk_bitmap *map;
	unsigned long pinned = 0;
	int error;

	map = kvzalloc(struct_size(map, pages, nr_pages), GFP_KERNEL_ACCOUNT);
	if (!map)
		return ERR_PTR(-ENOMEM);
	map->nr_pages = nr_pages;
	map->shift = ilog2(arg->granularity) - SECTOR_SHIFT;
	map->bits = arg->bytes * BITS_PER_BYTE;
	error = account_locked_vm(blk->dev.mm, nr_pages, true);
	if (error) {
		kvfree(map);
		return ERR_PTR(error);
	}
	while (pinned < nr_pages) {
		int count = pin_user_pages_fast(arg->address +
						pinned * PAGE_SIZE,
						nr_pages - pinned,
						FOLL_WRITE | FOLL_LONGTERM,
						map->pages + pinned);

		if (count <= 0) {
			free_bitmap(blk, map, pinned);
			return ERR_PTR(count ?: -EFAULT);
		}
		pinned += count;
	}
	return map;
}

/* Requests that are published from here on are marked in @map. */
static void use_bitmap(struct vhost_blk *blk, struct vhost_blk_bitmap *map)
{
	struct vhost_blk_bitmap *old = blk->changes;
	unsigned int i;

	for (i = 0; i < blk->nr_queues; i++) {
		struct vhost_blk_queue *queue = &blk->queues[i];

		mutex_lock(&queue->vq.mutex);
		queue->changes = map;
		mutex_unlock(&queue->vq.mutex);
	}
	blk->changes = map;
	if (old)
		free_bitmap(blk, old, old->nr_pages);
}

/**
 * vhost_blk_set_changes - begin a bitmap of changed blocks
 * @blk: the device, with its mutex held
 * @arg: the bitmap
 *
 * Return: 0, or an error; the bitmap that was set before is in use then.
 */
long vhost_blk_set_changes(struct vhost_blk *blk,
			   const struct vhost_blk_changes *arg)
{
	struct vhost_blk_bitmap *map;
	u64 capacity;

	if (arg->flags || arg->address % PAGE_SIZE || arg->bytes % 8 ||
	    !is_power_of_2(arg->granularity) ||
	    arg->granularity < VHOST_BLK_MIN_GRANULARITY)
		return -EINVAL;
	if (arg->bytes > VHOST_BLK_MAX_CHANGES_BYTES)
		return -E2BIG;
	if (!blk->disk)
		return -ENODEV;
	capacity = vhost_blk_capacity(blk) << SECTOR_SHIFT;
	if (!arg->bytes || DIV_ROUND_UP_ULL(capacity, arg->granularity) >
			   arg->bytes * BITS_PER_BYTE)
		return -EINVAL;
	if (!access_ok(u64_to_user_ptr(arg->address), arg->bytes))
		return -EFAULT;
	map = pin_bitmap(blk, arg);
	if (IS_ERR(map))
		return PTR_ERR(map);
	use_bitmap(blk, map);
	return 0;
}

/**
 * vhost_blk_stop_changes - end the bitmap of changed blocks
 * @blk: the device, with its mutex held
 *
 * Return: 0, or -EINVAL when none was set.
 */
long vhost_blk_stop_changes(struct vhost_blk *blk)
{
	if (!blk->changes)
		return -EINVAL;
	use_bitmap(blk, NULL);
	return 0;
}

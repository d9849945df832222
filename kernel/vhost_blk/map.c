// SPDX-License-Identifier: GPL-2.0-only
/*
 * The extent map: which requests are served in place, and where on the disk.
 *
 * The map belongs to the device, and changes only while its rings are paused.
 * A request that is not wholly inside is punted to the user (punt.c).
 */
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/string.h>

#include "vhost_blk.h"

/**
 * struct vhost_blk_table - an extent map
 * @capacity: sectors that the guest sees
 * @flags: VHOST_BLK_MAP_*
 * @count: how many extents there are
 * @extents: in order, apart from each other, none without rights
 */
struct vhost_blk_table {
	u64 capacity;
	u32 flags;
	u32 count;
	struct vhost_blk_extent extents[];
};

/* Sectors that the guest sees. */
u64 vhost_blk_capacity(const struct vhost_blk *blk)
{
	return blk->table ? blk->table->capacity :
			    bdev_nr_sectors(vhost_blk_disk(blk));
}

/* What happens to a request that is not served in place. */
static int punt_or_fail(const struct vhost_blk_table *table)
{
	return table->flags & VHOST_BLK_MAP_PUNT ? VHOST_BLK_PUNTED : -EIO;
}

/**
 * vhost_blk_locate - where a range is on the disk
 * @blk: the device
 * @sector: where the range is for the guest, within the capacity
 * @count: its sectors
 * @right: VHOST_BLK_EXTENT_READ or _WRITE
 * @at: where it is on the disk
 *
 * Return: 0, VHOST_BLK_PUNTED when the user serves it, or -EIO.
 */
int vhost_blk_locate(const struct vhost_blk *blk, u64 sector, u64 count,
		     u32 right, u64 *at)
{
	const struct vhost_blk_table *table = blk->table;
	const struct vhost_blk_extent *extent;
	unsigned int low = 0, high;
	u64 found = 0;

	*at = sector;
	if (!table || !count)
		return 0;
	/* The first extent that ends behind the range's first sector. */
	high = table->count;
	while (low < high) {
		unsigned int middle = low + (high - low) / 2;

		extent = &table->extents[middle];
		if (extent->sector + extent->sectors <= sector)
			low = middle + 1;
		else
			high = middle;
	}
	/* Extents that continue each other on the disk are as good as one. */
	for (; low < table->count && found < count; low++) {
		u64 skip, begin;

		extent = &table->extents[low];
		if (extent->sector > sector + found ||
		    !(extent->rights & right))
			break;
		skip = sector + found - extent->sector;
		begin = extent->disk_sector + skip;
		if (!found)
			*at = begin;
		else if (begin != *at + found)
			break;
		found += extent->sectors - skip;
	}
	if (found < count)
		return punt_or_fail(table);
	/* The disk may have shrunk. */
	if (*at + count > bdev_nr_sectors(vhost_blk_disk(blk)))
		return -EIO;
	return 0;
}

/* Whether the user serves flushes: what it has written may need its own. */
bool vhost_blk_punts_flushes(const struct vhost_blk *blk)
{
	return blk->table && blk->table->flags & VHOST_BLK_MAP_PUNT_FLUSH;
}

static bool is_valid_extent(const struct vhost_blk *blk,
			    const struct vhost_blk_extent *extent, u64 before,
			    u64 capacity)
{
	struct block_device *disk = vhost_blk_disk(blk);
	u64 mask = (bdev_logical_block_size(disk) >> SECTOR_SHIFT) - 1;
	u64 size = bdev_nr_sectors(disk);

	if (extent->reserved || !extent->sectors || extent->sector < before ||
	    extent->sectors > capacity ||
	    extent->sector > capacity - extent->sectors ||
	    (extent->sector | extent->sectors) & mask)
		return false;
	switch (extent->rights) {
	case 0:
		return true;
	case VHOST_BLK_EXTENT_READ:
	case VHOST_BLK_EXTENT_READ | VHOST_BLK_EXTENT_WRITE:
		return !(extent->disk_sector & mask) &&
		       extent->sectors <= size &&
		       extent->disk_sector <= size - extent->sectors;
	default:
		return false;
	}
}

/* Appends a part of an extent; joins it with the last one where that fits. */
static void append(struct vhost_blk_table *table,
		   const struct vhost_blk_extent *extent, u64 begin, u64 end)
{
	struct vhost_blk_extent *last = &table->extents[table->count];
	u64 at = extent->disk_sector + (begin - extent->sector);

	if (begin >= end || !extent->rights)
		return;
	if (table->count && last[-1].rights == extent->rights &&
	    last[-1].sector + last[-1].sectors == begin &&
	    last[-1].disk_sector + last[-1].sectors == at) {
		last[-1].sectors += end - begin;
		return;
	}
	table->count++;
	*last = (struct vhost_blk_extent) {
		.sector = begin,
		.sectors = end - begin,
		.disk_sector = at,
		.rights = extent->rights,
	};
}

/* Appends all parts of an older map between two sectors, from extent @i on. */
static unsigned int append_older(struct vhost_blk_table *table,
				 const struct vhost_blk_table *older,
				 unsigned int i, u64 begin, u64 end)
{
	for (; older && i < older->count; i++) {
		const struct vhost_blk_extent *extent = &older->extents[i];
		u64 behind = extent->sector + extent->sectors;

		append(table, extent, max(extent->sector, begin),
		       min(behind, end));
		if (behind > end)
			break;
	}
	return i;
}

static struct vhost_blk_table *
make_table(const struct vhost_blk_map *arg,
	   const struct vhost_blk_extent *extents,
	   const struct vhost_blk_table *older)
{
	/* Each extent may cut an older one in two. */
	size_t most = 2 * (size_t)arg->count + (older ? older->count : 0);
	struct vhost_blk_table *table;
	unsigned int i, from = 0;
	u64 done = 0;

	table = kvmalloc(struct_size(table, extents, most), GFP_KERNEL_ACCOUNT);
	if (!table)
		return NULL;
	table->capacity = arg->capacity;
	table->flags = arg->flags & ~VHOST_BLK_MAP_UPDATE;
	table->count = 0;
	for (i = 0; i < arg->count; i++) {
		u64 end = extents[i].sector + extents[i].sectors;

		from = append_older(table, older, from, done,
				    extents[i].sector);
		append(table, &extents[i], extents[i].sector, end);
		done = end;
	}
	append_older(table, older, from, done, arg->capacity);
	return table;
}

static void use_table(struct vhost_blk *blk, struct vhost_blk_table *table)
{
	vhost_blk_pause(blk);
	kvfree(blk->table);
	blk->table = table;
	vhost_blk_resume(blk);
}

/**
 * vhost_blk_set_map - set or change the extent map
 * @blk: the device, with its mutex held
 * @arg: the map
 *
 * Return: 0, or an error; the former map is in use then.
 */
long vhost_blk_set_map(struct vhost_blk *blk, const struct vhost_blk_map *arg)
{
	struct vhost_blk_extent *extents;
	struct vhost_blk_table *table;
	u64 before = 0;
	u32 i;

	if (!blk->disk)
		return -ENODEV;
	if (arg->flags & ~(VHOST_BLK_MAP_UPDATE | VHOST_BLK_MAP_PUNT |
			   VHOST_BLK_MAP_PUNT_FLUSH) ||
	    (arg->flags & VHOST_BLK_MAP_PUNT_FLUSH &&
	     !(arg->flags & VHOST_BLK_MAP_PUNT)) ||
	    (arg->flags & VHOST_BLK_MAP_UPDATE && !blk->table) ||
	    !arg->capacity || arg->capacity > VHOST_BLK_MAX_CAPACITY ||
	    !vhost_blk_can_mark(&blk->queues[0], arg->capacity))
		return -EINVAL;
	if (arg->count > VHOST_BLK_MAX_EXTENTS)
		return -E2BIG;
	extents = vmemdup_array_user(u64_to_user_ptr(arg->extents), arg->count,
				     sizeof(*extents));
	if (IS_ERR(extents))
		return PTR_ERR(extents);
	for (i = 0; i < arg->count; i++) {
		if (!is_valid_extent(blk, &extents[i], before, arg->capacity)) {
			kvfree(extents);
			return -EINVAL;
		}
		before = extents[i].sector + extents[i].sectors;
	}
	table = make_table(arg, extents, arg->flags & VHOST_BLK_MAP_UPDATE ?
			   blk->table : NULL);
	kvfree(extents);
	if (!table)
		return -ENOMEM;
	if (table->count > VHOST_BLK_MAX_EXTENTS) {
		kvfree(table);
		return -E2BIG;
	}
	use_table(blk, table);
	return 0;
}

/**
 * vhost_blk_stop_map - serve the whole disk in place
 * @blk: the device, with its mutex held
 *
 * Return: 0, or -EINVAL when there is no map.
 */
long vhost_blk_stop_map(struct vhost_blk *blk)
{
	if (!blk->table)
		return -EINVAL;
	use_table(blk, NULL);
	return 0;
}

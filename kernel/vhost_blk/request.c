// SPDX-License-Identifier: GPL-2.0-only
/*
 * A request: from its descriptors to bios.
 *
 * Header, data and status are found by byte, not by descriptor (virtio 1.2,
 * section 2.7.4): the header is the first 16 bytes that the device may read,
 * the status the last byte that it may write, the data all between.
 */
#include <linux/uio.h>

#include "vhost_blk.h"
#include "trace.h"

static struct block_device *disk_of(const struct vhost_blk_req *req)
{
	return vhost_blk_disk(req->queue->blk);
}

static bool is_write_through(const struct vhost_blk_req *req)
{
	struct vhost_blk_queue *queue = req->queue;

	return queue->blk->config.flags & VHOST_BLK_CONFIG_WRITE_THROUGH ||
	       !vhost_has_feature(&queue->vq, VIRTIO_BLK_F_FLUSH);
}

/* Whether whole blocks, within the present capacity, are meant. */
static bool is_valid_range(const struct vhost_blk_req *req, u64 sector,
			   u64 count)
{
	u64 capacity = vhost_blk_capacity(req->queue->blk);
	u64 mask = (bdev_logical_block_size(disk_of(req)) >> SECTOR_SHIFT) - 1;

	return !((sector | count) & mask) && count <= capacity &&
	       sector <= capacity - count;
}

static void fail_req(struct vhost_blk_req *req, int error)
{
	cmpxchg(&req->error, 0, error);
}

static void end_bio(struct bio *bio)
{
	struct vhost_blk_req *req = bio->bi_private;

	if (bio->bi_status)
		fail_req(req, blk_status_to_errno(bio->bi_status));
	bio_put(bio);
	vhost_blk_put_req(req);
}

static void submit_req_bio(struct vhost_blk_req *req, struct bio *bio)
{
	bio->bi_private = req;
	bio->bi_end_io = end_bio;
	atomic_inc(&req->pending);
	submit_bio(bio);
}

void vhost_blk_submit_flush(struct vhost_blk_req *req)
{
	struct bio *bio = bio_alloc(disk_of(req), 0,
				    REQ_OP_WRITE | REQ_PREFLUSH, GFP_KERNEL);

	atomic_set(&req->pending, 1);
	submit_req_bio(req, bio);
	vhost_blk_put_req(req);
}

/* Counts memory that the request gives back with its data. */
static void count_memory(struct vhost_blk_req *req, size_t bytes)
{
	req->memory += bytes;
	req->queue->memory += bytes;
}

static int alloc_page_array(struct vhost_blk_req *req, unsigned int pages)
{
	req->pages = req->inline_pages;
	if (pages <= VHOST_BLK_INLINE_PAGES)
		return 0;
	req->pages = kvmalloc_array(pages, sizeof(*req->pages),
				    GFP_KERNEL_ACCOUNT);
	if (!req->pages)
		return -ENOMEM;
	count_memory(req, pages * sizeof(*req->pages));
	return 0;
}

static void add_page(struct vhost_blk_req *req, struct page *page,
		     unsigned int len, unsigned int offset)
{
	bvec_set_page(&req->pages[req->nr_pages++], page, len, offset);
}

/* Pins the guest's pages: nothing is copied. */
static int pin_data(struct vhost_blk_req *req, struct iov_iter *iter)
{
	int error = alloc_page_array(req, iov_iter_npages(iter, INT_MAX));

	if (error)
		return error;
	while (iov_iter_count(iter)) {
		struct page *batch[16], **pages = batch;
		size_t offset;
		ssize_t len = iov_iter_extract_pages(iter, &pages, SIZE_MAX,
						     ARRAY_SIZE(batch), 0,
						     &offset);

		if (len <= 0)
			return len ?: -EFAULT;
		for (; len > 0; pages++, offset = 0) {
			size_t part = min_t(size_t, len, PAGE_SIZE - offset);

			add_page(req, *pages, part, offset);
			len -= part;
		}
	}
	return 0;
}

/* Puts pages of our own under buffers that the disk cannot reach. */
static int bounce_data(struct vhost_blk_req *req, struct iov_iter *iter)
{
	size_t left = iov_iter_count(iter);
	int error = alloc_page_array(req, DIV_ROUND_UP(left, PAGE_SIZE));

	if (error)
		return error;
	req->bounced = true;
	req->queue->stats.bounced++;
	if (req->is_read) {
		req->iov = dup_iter(&req->iter, iter, GFP_KERNEL_ACCOUNT);
		if (!req->iov)
			return -ENOMEM;
	}
	while (left) {
		size_t part = min_t(size_t, left, PAGE_SIZE);
		struct page *page = alloc_page(GFP_KERNEL_ACCOUNT);

		if (!page)
			return -ENOMEM;
		count_memory(req, PAGE_SIZE);
		add_page(req, page, part, 0);
		if (!req->is_read &&
		    copy_page_from_iter(page, 0, part, iter) != part)
			return -EFAULT;
		left -= part;
	}
	return 0;
}

/**
 * vhost_blk_release_data - give the pages back
 * @req: the request, whose bios have ended
 *
 * Return: 0, or -EFAULT when data could not be copied to the guest.
 */
int vhost_blk_release_data(struct vhost_blk_req *req)
{
	int error = 0;
	unsigned int i;

	for (i = 0; i < req->nr_pages; i++) {
		struct bio_vec *at = &req->pages[i];

		if (!req->bounced) {
			unpin_user_pages_dirty_lock(&at->bv_page, 1,
						    req->is_read);
			continue;
		}
		if (req->is_read && !req->error && !error &&
		    copy_page_to_iter(at->bv_page, 0, at->bv_len,
				      &req->iter) != at->bv_len)
			error = -EFAULT;
		__free_page(at->bv_page);
	}
	if (req->pages != req->inline_pages)
		kvfree(req->pages);
	kfree(req->iov);
	req->queue->memory -= req->memory;
	req->memory = 0;
	req->pages = NULL;
	req->iov = NULL;
	req->nr_pages = 0;
	return error;
}

static void submit_pages(struct vhost_blk_req *req, u64 sector)
{
	blk_opf_t opf = REQ_OP_READ;
	unsigned int i = 0;

	if (!req->is_read) {
		opf = REQ_OP_WRITE | REQ_SYNC | REQ_IDLE;
		if (is_write_through(req))
			opf |= REQ_FUA;
	}
	atomic_set(&req->pending, 1);
	while (i < req->nr_pages) {
		unsigned int count = min_t(unsigned int, req->nr_pages - i,
					   BIO_MAX_VECS);
		struct bio *bio = bio_alloc(disk_of(req), count, opf,
					    GFP_KERNEL);

		bio->bi_iter.bi_sector = sector;
		for (; count; count--, i++)
			__bio_add_page(bio, req->pages[i].bv_page,
				       req->pages[i].bv_len,
				       req->pages[i].bv_offset);
		sector += bio_sectors(bio);
		submit_req_bio(req, bio);
	}
	vhost_blk_put_req(req);
}

static int submit_rw(struct vhost_blk_req *req, u64 sector,
		     struct iov_iter *iter)
{
	struct block_device *disk = disk_of(req);
	size_t len = iov_iter_count(iter);
	/*
	 * Blocks of pinned pages are whole: a bio may be cut between any two
	 * pages.
	 */
	unsigned int unaligned = bdev_dma_alignment(disk) |
				 (bdev_logical_block_size(disk) - 1);
	u64 at;
	int error;

	if (!req->is_read && vhost_blk_is_read_only(req->queue->blk))
		return -EROFS;
	if (len % SECTOR_SIZE || len > VHOST_BLK_MAX_BYTES ||
	    !is_valid_range(req, sector, len >> SECTOR_SHIFT))
		return -EIO;
	if (!len)
		return 0;
	if (!req->is_read &&
	    !vhost_blk_can_mark(req->queue, sector + (len >> SECTOR_SHIFT)))
		return -EIO;
	req->data_bytes = len;
	error = vhost_blk_locate(req->queue->blk, sector, len >> SECTOR_SHIFT,
				 req->is_read ? VHOST_BLK_EXTENT_READ :
						VHOST_BLK_EXTENT_WRITE, &at);
	if (error) {
		req->is_change = error > 0 && !req->is_read;
		return error;
	}
	if (iov_iter_alignment(iter) & unaligned)
		error = bounce_data(req, iter);
	else
		error = pin_data(req, iter);
	if (error)
		return error;
	req->is_change = !req->is_read;
	submit_pages(req, at);
	return -EINPROGRESS;
}

/* Takes one copy of the ranges, and holds each against the limits. */
static int take_ranges(struct vhost_blk_req *req, struct iov_iter *iter,
		       unsigned int count, u32 allowed_flags, u32 longest)
{
	struct virtio_blk_discard_write_zeroes *ranges;
	unsigned int i;

	ranges = kmalloc_array(count, sizeof(*ranges), GFP_KERNEL_ACCOUNT);
	if (!ranges)
		return -ENOMEM;
	/* The end of the request frees them. */
	req->ranges = ranges;
	req->nr_ranges = count;
	if (!copy_from_iter_full(ranges, count * sizeof(*ranges), iter))
		return -EIO;
	for (i = 0; i < count; i++) {
		u64 sector = le64_to_cpu(ranges[i].sector);
		u32 sectors = le32_to_cpu(ranges[i].num_sectors);

		if (le32_to_cpu(ranges[i].flags) & ~allowed_flags)
			return -EOPNOTSUPP;
		if ((longest && sectors > longest) ||
		    !is_valid_range(req, sector, sectors) ||
		    !vhost_blk_can_mark(req->queue, sector + sectors))
			return -EIO;
	}
	return 0;
}

/* Whether all ranges are served in place. */
static int locate_ranges(const struct vhost_blk_req *req)
{
	unsigned int i;
	int error = 0;
	u64 at;

	for (i = 0; i < req->nr_ranges && !error; i++)
		error = vhost_blk_locate(req->queue->blk,
					 le64_to_cpu(req->ranges[i].sector),
					 le32_to_cpu(req->ranges[i].num_sectors),
					 VHOST_BLK_EXTENT_WRITE, &at);
	return error;
}

static int submit_ranges(struct vhost_blk_req *req, bool is_discard,
			 struct iov_iter *iter)
{
	struct vhost_blk *blk = req->queue->blk;
	size_t len = iov_iter_count(iter);
	unsigned int i, count = len / sizeof(*req->ranges);
	struct bio *bio = NULL;
	int error;

	if (vhost_blk_is_read_only(blk))
		return -EROFS;
	if (!count || len % sizeof(*req->ranges) || count > VHOST_BLK_MAX_RANGES)
		return -EIO;
	error = take_ranges(req, iter, count, is_discard ? 0 :
			    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
			    is_discard ? blk->config.max_discard_sectors :
			    blk->config.max_write_zeroes_sectors);
	if (error)
		return error;
	error = locate_ranges(req);
	if (!error && is_discard && !bdev_max_discard_sectors(disk_of(req)))
		error = -EOPNOTSUPP;
	req->is_change = error >= 0;
	if (error)
		return error;
	for (i = 0; i < count && !error; i++) {
		u32 sectors = le32_to_cpu(req->ranges[i].num_sectors);
		unsigned int keep = req->ranges[i].flags ? 0 :
							   BLKDEV_ZERO_NOUNMAP;
		u64 sector;

		error = vhost_blk_locate(blk, le64_to_cpu(req->ranges[i].sector),
					 sectors, VHOST_BLK_EXTENT_WRITE,
					 &sector);
		if (error)
			break;

		if (is_discard)
			__blkdev_issue_discard(disk_of(req), sector, sectors,
					       GFP_KERNEL, &bio);
		else
			error = __blkdev_issue_zeroout(disk_of(req), sector,
						       sectors, GFP_KERNEL,
						       &bio, keep);
	}
	if (!bio)
		return error;
	/* The others are chained to this one, their errors too. */
	fail_req(req, error);
	req->flush_after = is_write_through(req);
	atomic_set(&req->pending, 1);
	submit_req_bio(req, bio);
	vhost_blk_put_req(req);
	return -EINPROGRESS;
}

static int get_id(struct vhost_blk_req *req, struct iov_iter *iter)
{
	size_t len = min_t(size_t, iov_iter_count(iter), VHOST_BLK_SERIAL_BYTES);

	if (copy_to_iter(req->queue->blk->config.serial, len, iter) != len)
		return -EFAULT;
	req->data_bytes = len;
	return 0;
}

static bool is_answered_with_data(u32 type)
{
	return type == VIRTIO_BLK_T_IN || type == VIRTIO_BLK_T_GET_ID;
}

/**
 * vhost_blk_submit - begin a request
 * @req: the request; its descriptors are in vq->iov
 * @out: how many of them the device reads
 * @in: how many behind them the device writes, with 1 byte at least in all
 *
 * Context: the owner's memory, with the ring's mutex held.
 * Return: -EINPROGRESS when the end of bios completes the request;
 * VHOST_BLK_PUNTED when the user does; else it is complete, with this error.
 */
int vhost_blk_submit(struct vhost_blk_req *req, unsigned int out,
		     unsigned int in)
{
	struct vhost_blk_stats *stats = &req->queue->stats;
	struct vhost_virtqueue *vq = &req->queue->vq;
	struct iov_iter from, to;
	struct virtio_blk_outhdr header;

	iov_iter_init(&from, ITER_SOURCE, vq->iov, out,
		      iov_length(vq->iov, out));
	iov_iter_init(&to, ITER_DEST, vq->iov + out, in,
		      iov_length(vq->iov + out, in) - 1);
	if (!copy_from_iter_full(&header, sizeof(header), &from)) {
		stats->others++;
		return -EIO;
	}
	req->type = vhost32_to_cpu(vq, header.type);
	req->sector = vhost64_to_cpu(vq, header.sector);
	req->bytes = iov_iter_count(is_answered_with_data(req->type) ? &to :
								       &from);
	trace_vhost_blk_submit(req);
	switch (req->type) {
	case VIRTIO_BLK_T_IN:
		stats->reads++;
		req->is_read = true;
		return submit_rw(req, req->sector, &to);
	case VIRTIO_BLK_T_OUT:
		stats->writes++;
		return submit_rw(req, req->sector, &from);
	case VIRTIO_BLK_T_FLUSH:
		stats->flushes++;
		if (vhost_blk_punts_flushes(req->queue->blk))
			return VHOST_BLK_PUNTED;
		vhost_blk_submit_flush(req);
		return -EINPROGRESS;
	case VIRTIO_BLK_T_DISCARD:
		stats->discards++;
		return submit_ranges(req, true, &from);
	case VIRTIO_BLK_T_WRITE_ZEROES:
		stats->write_zeroes++;
		return submit_ranges(req, false, &from);
	case VIRTIO_BLK_T_GET_ID:
		stats->others++;
		req->is_read = true;
		return get_id(req, &to);
	default:
		stats->others++;
		return -EOPNOTSUPP;
	}
}

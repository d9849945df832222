/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef VIRTIO_BLK_URING_H
#define VIRTIO_BLK_URING_H

#include <linux/blk-mq.h>
#include <linux/cdev.h>
#include <linux/scatterlist.h>
#include <linux/virtio_blk.h>
#include <linux/virtio_blk_uring.h>

struct io_comp_batch;
struct io_uring_cmd;

/* The stock driver's, which keeps it to itself. */
struct virtblk_req {
	struct virtio_blk_outhdr out_hdr;
	union {
		u8 status;
		struct {
			__virtio64 sector;
			u8 status;
		} zone_append;
	} in_hdr;
	size_t in_hdr_len;
	struct sg_table sg_table;
	struct scatterlist sg[];
};

/**
 * struct vbu_limits - what a disk's device can do; constant
 * @features: that driver and device have agreed on
 * @is_little_endian: the header's fields, else the machine's own
 * @max_discard_sectors: 0: no discard
 * @max_discard_ranges: in a request
 * @discard_align_sectors: 0: unknown
 * @max_write_zeroes_sectors: 0: no write zeroes
 * @max_write_zeroes_ranges: in a request
 */
struct vbu_limits {
	u64 features;
	bool is_little_endian;
	u32 max_discard_sectors;
	u32 max_discard_ranges;
	u32 discard_align_sectors;
	u32 max_write_zeroes_sectors;
	u32 max_write_zeroes_ranges;
};

/**
 * struct vbu_node - a node /dev/vdXc0; lives as long as it is open
 * @cdev: its operations
 * @dev: its name in sysfs and /dev; counts references
 * @disk: the disk, to compare with; may be freed when @is_gone
 * @disk_number: the disk's own device number
 * @is_gone: the disk was removed
 * @limits: the device's
 */
struct vbu_node {
	struct cdev cdev;
	struct device dev;
	struct gendisk *disk;
	dev_t disk_number;
	bool is_gone;
	struct vbu_limits limits;
};

/**
 * struct vbu_open - an open node
 * @node: the node
 * @disk: the disk's own node, which keeps queue and driver
 */
struct vbu_open {
	struct vbu_node *node;
	struct file *disk;
};

static inline struct block_device *vbu_bdev(const struct vbu_open *open)
{
	return file_bdev(open->disk);
}

int vbu_uring_cmd(struct io_uring_cmd *ioucmd, unsigned int issue_flags);
int vbu_uring_cmd_iopoll(struct io_uring_cmd *ioucmd,
			 struct io_comp_batch *batch, unsigned int poll_flags);
int vbu_get_serial(struct vbu_open *open, u8 serial[VIRTBLK_SERIAL_BYTES]);
u32 vbu_max_bytes(struct request_queue *q);

#endif

/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * User interface of /dev/vdXc0: requests to a virtio-blk disk by io_uring's
 * IORING_OP_URING_CMD, past the block layer's files and schedulers. The module
 * virtio_blk_uring makes the nodes.
 */
#ifndef _UAPI_LINUX_VIRTIO_BLK_URING_H
#define _UAPI_LINUX_VIRTIO_BLK_URING_H

#include <linux/types.h>
#include <linux/ioctl.h>

/*
 * sqe->cmd_op. The first two take a struct virtblk_uring_cmd in sqe->cmd, and
 * so need an SQE of 128 bytes: -EINVAL without one. The other two take a struct
 * virtblk_uring_compact and work in SQEs of 64 bytes, too.
 *
 * A command has one buffer, or with _VEC an array of at most 1024 struct iovec
 * (struct compat_iovec in a ring that a 32-bit program has made).
 * IORING_URING_CMD_FIXED in sqe->uring_cmd_flags: the buffer is inside the
 * registered buffer sqe->buf_index; for VIRTIO_BLK_T_IN and _OUT without _VEC.
 */
#define VIRTBLK_URING_CMD_IO		1
#define VIRTBLK_URING_CMD_IO_VEC	2
#define VIRTBLK_URING_CMD_COMPACT	3
#define VIRTBLK_URING_CMD_COMPACT_VEC	4

/*
 * Types, those of <linux/virtio_blk.h>; each other type is -EOPNOTSUPP and does
 * not reach the device.
 *
 * IN, OUT	sector and bytes are whole logical blocks, at least one; address
 *		and length of each buffer are multiples of buffer_align
 * FLUSH	sector, data and data_len are 0
 * GET_ID	sector is 0; data gets min(data_len, 20) bytes; not _VEC
 * DISCARD,	sector is 0; data has data_len / 16 of struct
 * WRITE_ZEROES	virtio_blk_discard_write_zeroes in little endian, whole logical
 *		blocks each; flags: UNMAP with WRITE_ZEROES only; not _VEC
 *
 * cqe->res is 0 or
 * -EINVAL	a field, an alignment, a length or a combination that is invalid
 * -EOPNOTSUPP	a type or a cmd_op that is unknown, that the device has not
 *		negotiated, or is not possible in this way (polled without poll
 *		queues, fixed vectors)
 * -EBADF	OUT, DISCARD or WRITE_ZEROES through a node that is not open for
 *		writing
 * -EROFS	the same, of a disk that is read-only
 * -ENOSPC	a range that is not inside the disk
 * -E2BIG	more bytes, segments or ranges than a request may have
 * -EFAULT	memory of the program that is not there
 * -EPERM	a priority that the program may not use
 * -ENODEV	the disk was removed
 * -EIO		the device has failed the request
 *
 * A flush of a device without a write cache is complete at once.
 */

/**
 * struct virtblk_uring_cmd - a command in an SQE of 128 bytes
 * @type: VIRTIO_BLK_T_*
 * @ioprio: priority, IOPRIO_PRIO_VALUE; 0: none
 * @sector: first sector of 512 bytes
 * @data: address of the buffer or of the array of struct iovec
 * @data_len: bytes of the buffer or number of struct iovec
 * @flag: 0; with VIRTBLK_URING_CMD_IO_VEC 1 is the same
 *
 * The 48 bytes that follow in sqe->cmd are not looked at.
 */
struct virtblk_uring_cmd {
	__u32 type;
	__u32 ioprio;
	__u64 sector;
	__u64 data;
	__u32 data_len;
	__u32 flag;
};

/**
 * struct virtblk_uring_compact - a command in any SQE
 * @sector: as above
 * @type: as above
 * @ioprio: as above
 *
 * data is sqe->addr, data_len is sqe->len.
 */
struct virtblk_uring_compact {
	__u64 sector;
	__u32 type;
	__u32 ioprio;
};

#define VIRTBLK_SERIAL_BYTES	20

/* Nothing can be written. */
#define VIRTBLK_INFO_READ_ONLY		0x1
/* A write is durable after a flush only. */
#define VIRTBLK_INFO_WRITE_CACHE	0x2
/* Rings with IORING_SETUP_IOPOLL are possible. */
#define VIRTBLK_INFO_POLL		0x4

/**
 * struct virtblk_info - the disk behind a node
 * @capacity: sectors of 512 bytes, as of now
 * @features: VIRTIO_BLK_F_* and VIRTIO_F_* that driver and device have agreed
 *	on, one bit each
 * @flags: VIRTBLK_INFO_*
 * @block_bytes: logical block
 * @physical_block_bytes: physical block
 * @optimal_io_bytes: length that suits the device best; 0: unknown
 * @buffer_align: addresses and lengths of buffers are multiples of it
 * @max_bytes: a request of so many bytes is possible with any one buffer
 * @max_segments: pieces of memory, each of adjacent pages, in a request
 * @max_segment_bytes: longest of these pieces
 * @max_discard_sectors: longest range of a discard; 0: no discard
 * @max_discard_ranges: ranges in a discard
 * @discard_align_sectors: discards of such units are useful; 0: unknown
 * @max_write_zeroes_sectors: longest range of write zeroes; 0: no write zeroes
 * @max_write_zeroes_ranges: ranges in a write zeroes request
 * @queues: virtqueues that are not polled
 * @poll_queues: virtqueues that are polled
 * @serial: what GET_ID answers, padded with zeroes; zeroes only when it fails
 * @reserved: 0
 */
struct virtblk_info {
	__u64 capacity;
	__u64 features;
	__u32 flags;
	__u32 block_bytes;
	__u32 physical_block_bytes;
	__u32 optimal_io_bytes;
	__u32 buffer_align;
	__u32 max_bytes;
	__u32 max_segments;
	__u32 max_segment_bytes;
	__u32 max_discard_sectors;
	__u32 max_discard_ranges;
	__u32 discard_align_sectors;
	__u32 max_write_zeroes_sectors;
	__u32 max_write_zeroes_ranges;
	__u32 queues;
	__u32 poll_queues;
	__u8 serial[VIRTBLK_SERIAL_BYTES];
	__u32 reserved[16];
};

/* Fills a struct virtblk_info; -ENODEV after the disk was removed. */
#define VIRTBLK_GET_INFO	_IOR('V', 0xB0, struct virtblk_info)

#endif

/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * User interface of /dev/vhost-blk: virtio-blk served by the host's kernel
 * from a block device. Memory table, rings, eventfds and workers are set by
 * the ioctls of <linux/vhost.h>.
 */
#ifndef _UAPI_LINUX_VHOST_BLK_H
#define _UAPI_LINUX_VHOST_BLK_H

#include <linux/types.h>
#include <linux/ioctl.h>
#include <linux/vhost.h>

/*
 * Attach the block device that a file descriptor names, exclusively: EBUSY
 * while another holder, such as an instance whose process was killed, has
 * requests in flight. A descriptor that is open read-only makes the device
 * read-only. -1 detaches; EBUSY while a ring runs.
 * An instance ends with the last descriptor of /dev/vhost-blk: open it with
 * O_CLOEXEC, or a child keeps the disk from the successor.
 */
#define VHOST_BLK_SET_DISK	_IOW(VHOST_VIRTIO, 0xF0, int)

/*
 * Start the ring @index, whose memory, addresses and base are set. Requests
 * that are available are served at once. @num is 0.
 * A successor of a process that was killed sets the base to the index of the
 * used ring, after VHOST_BLK_SET_DISK has succeeded: not before.
 */
#define VHOST_BLK_START_VRING	_IOW(VHOST_VIRTIO, 0xF1, struct vhost_vring_state)

/*
 * Stop the ring @index: returns when all its requests are complete, so that
 * VHOST_GET_VRING_BASE is exact. @num is 0. Punted requests are given back.
 */
#define VHOST_BLK_STOP_VRING	_IOW(VHOST_VIRTIO, 0xF2, struct vhost_vring_state)

#define VHOST_BLK_SERIAL_BYTES	20

/* The device refuses each request that would change the disk. */
#define VHOST_BLK_CONFIG_READ_ONLY	0x1
/* Each write is durable when it is complete (CONFIG_WCE is off). */
#define VHOST_BLK_CONFIG_WRITE_THROUGH	0x2

/**
 * struct vhost_blk_config - properties that the device's user has set
 * @flags: VHOST_BLK_CONFIG_*
 * @max_discard_sectors: longest range of a discard; 0: no limit
 * @max_write_zeroes_sectors: longest range of write zeroes; 0: no limit
 * @serial: the answer to VIRTIO_BLK_T_GET_ID, padded with zeroes
 */
struct vhost_blk_config {
	__u32 flags;
	__u32 max_discard_sectors;
	__u32 max_write_zeroes_sectors;
	__u8 serial[VHOST_BLK_SERIAL_BYTES];
};

#define VHOST_BLK_SET_CONFIG	_IOW(VHOST_VIRTIO, 0xF3, struct vhost_blk_config)

/* Batches of 1, 2-3, 4-7, … completed requests; the last counts all above. */
#define VHOST_BLK_BATCH_BUCKETS	8

/**
 * struct vhost_blk_stats - counters of a ring since the device was opened
 * @index: the ring, set by the caller
 * @inflight: requests that are taken and not published
 * @kicks: runs of the ring's handler
 * @reads: VIRTIO_BLK_T_IN, whatever their outcome, as all others
 * @writes: VIRTIO_BLK_T_OUT
 * @flushes: VIRTIO_BLK_T_FLUSH
 * @discards: VIRTIO_BLK_T_DISCARD
 * @write_zeroes: VIRTIO_BLK_T_WRITE_ZEROES
 * @others: all other types, malformed requests included
 * @read_bytes: bytes that were read without an error
 * @written_bytes: bytes that were written without an error
 * @errors: requests with another status than VIRTIO_BLK_S_OK
 * @bounced: reads and writes whose buffers were too unaligned for the disk
 * @fallbacks: completions while the ring's worker was dead
 * @batches: completions by the number of requests, VHOST_BLK_BATCH_BUCKETS
 */
struct vhost_blk_stats {
	__u32 index;
	__u32 inflight;
	__u64 kicks;
	__u64 reads;
	__u64 writes;
	__u64 flushes;
	__u64 discards;
	__u64 write_zeroes;
	__u64 others;
	__u64 read_bytes;
	__u64 written_bytes;
	__u64 errors;
	__u64 bounced;
	__u64 fallbacks;
	__u64 batches[VHOST_BLK_BATCH_BUCKETS];
};

#define VHOST_BLK_GET_STATS	_IOWR(VHOST_VIRTIO, 0xF4, struct vhost_blk_stats)

/* Fewest bytes of the disk for a bit of the bitmap of changed blocks. */
#define VHOST_BLK_MIN_GRANULARITY	4096
/* Longest bitmap of changed blocks, in bytes. */
#define VHOST_BLK_MAX_CHANGES_BYTES	(64 << 20)

/**
 * struct vhost_blk_changes - a bitmap of changed blocks
 * @address: where it is in the caller's memory, a multiple of the page size
 * @bytes: its length, a multiple of 8; a bit for each block of the disk
 * @granularity: bytes of a block, a power of two
 * @flags: 0
 */
struct vhost_blk_changes {
	__u64 address;
	__u64 bytes;
	__u32 granularity;
	__u32 flags;
};

/*
 * Mark the blocks that a write, discard or write zeroes request has changed,
 * or may have changed before it failed. Block n is bit n % 8 of byte n / 8.
 * The marks are set before the request is published in its used ring, for
 * each request that is published after this call has returned; also when the
 * caller is dead. Requests that were refused are not marked.
 *
 * The caller may clear marks at any time by an atomic exchange, and reads a
 * block after it has cleared the mark, not before. The bits of a shared
 * mapping outlive the device: map a memfd.
 *
 * The pages are pinned, and count for RLIMIT_MEMLOCK. Another call replaces
 * the bitmap; a request that is published meanwhile is marked in one of the
 * two. An error leaves the former bitmap in use. When the disk has grown,
 * requests that begin or end behind the bitmap's last bit fail until there is
 * a longer one.
 *
 * EINVAL: an odd address, length, granularity or flag, or too few bits for
 * the disk. E2BIG: more than VHOST_BLK_MAX_CHANGES_BYTES. ENODEV: no disk.
 * ENOMEM: RLIMIT_MEMLOCK. EFAULT: the memory cannot be written, or not be
 * pinned because it is a mapping of a file on a disk.
 */
#define VHOST_BLK_SET_CHANGES	_IOW(VHOST_VIRTIO, 0xF5, struct vhost_blk_changes)

/*
 * Mark no more. EINVAL: no bitmap is set. The detach of the disk does the
 * same.
 */
#define VHOST_BLK_STOP_CHANGES	_IO(VHOST_VIRTIO, 0xF6)

/* Reads of the extent are served in place. */
#define VHOST_BLK_EXTENT_READ	0x1
/* Writes, discards and write zeroes, too; only together with _READ. */
#define VHOST_BLK_EXTENT_WRITE	0x2

/**
 * struct vhost_blk_extent - a range that is served in place
 * @sector: where it is for the guest
 * @sectors: how long it is
 * @disk_sector: where it is on the disk
 * @rights: VHOST_BLK_EXTENT_*; 0 removes the range from the map
 * @reserved: 0
 */
struct vhost_blk_extent {
	__u64 sector;
	__u64 sectors;
	__u64 disk_sector;
	__u32 rights;
	__u32 reserved;
};

/* Most extents of a call, and of the map that comes of it. */
#define VHOST_BLK_MAX_EXTENTS	65536

/* The extents change the present map; else they are the whole map. */
#define VHOST_BLK_MAP_UPDATE	0x1
/* Requests that are not wholly inside are punted; else they fail. */
#define VHOST_BLK_MAP_PUNT	0x2
/* Flushes are punted, too. */
#define VHOST_BLK_MAP_PUNT_FLUSH	0x4

/**
 * struct vhost_blk_map - which requests are served in place, and where
 * @capacity: sectors that the guest sees, whatever the disk has
 * @extents: address of an array of struct vhost_blk_extent, in the order of
 *	their sectors, apart from each other
 * @count: how many there are
 * @flags: VHOST_BLK_MAP_*
 */
struct vhost_blk_map {
	__u64 capacity;
	__u64 extents;
	__u32 count;
	__u32 flags;
};

/*
 * Set or change the extent map. Without one, the guest sees the whole disk.
 * A map with one extent makes a part of the disk a device of its own.
 *
 * The call returns when each request that was served in place by the former
 * map has ended: after the write right of a range is dropped, no write to it
 * is on its way. It does not wait for punted requests.
 *
 * A request is served in place when each of its sectors is in the map with
 * the right that it needs, and all of them follow each other on the disk; a
 * discard or write zeroes request, when all its ranges are. Others are punted
 * whole: see struct vhost_blk_punted. GET_ID is never punted, malformed and
 * refused requests are not. Changed blocks count from the guest's sector 0,
 * and are marked for punted requests as well, when these are complete.
 *
 * EINVAL: an unknown flag, UPDATE without a map, PUNT_FLUSH without PUNT, a
 * capacity of 0, above 2^54, or with too short a bitmap of changed blocks; an
 * extent that is empty, out of order, beyond the capacity or the disk, not
 * aligned to the disk's blocks, or with other rights. E2BIG: more than
 * VHOST_BLK_MAX_EXTENTS. ENODEV: no disk. An error changes nothing.
 */
#define VHOST_BLK_SET_MAP	_IOW(VHOST_VIRTIO, 0xF7, struct vhost_blk_map)

/*
 * Serve the whole disk in place, as before the first map. EINVAL: there is no
 * map. The detach of the disk does the same.
 */
#define VHOST_BLK_STOP_MAP	_IO(VHOST_VIRTIO, 0xF8)

/**
 * struct vhost_blk_punted - a request that the user serves; read(2)
 * @queue: its ring
 * @head: its head in the descriptor table
 *
 * read() of /dev/vhost-blk returns as many of them as there are and fit; poll()
 * says when there are some; EAGAIN with O_NONBLOCK. The owner alone may read:
 * EPERM. The user finds the request by its head, and checks everything in it:
 * the guest may have changed it since. It writes data and status into the
 * guest's memory, and then a struct vhost_blk_completion to /dev/vhost-blk.
 *
 * While a punted request is not complete, requests of its ring that were
 * taken behind it are served, but not published. Published requests are thus
 * always the oldest, and the index of the used ring says which: a successor
 * that begins there serves every other request, some of them for a second
 * time, and no published one. This is the guest's at-least-once: it has not
 * been told of any of them.
 *
 * VHOST_BLK_STOP_VRING, VHOST_RESET_OWNER, VHOST_BLK_SET_BACKEND and the end
 * of the device do not wait for punted requests. They give them and those
 * behind them back: the ring's base is that of the oldest, and the next run,
 * in whatever process, takes them again. The user ends its own work on them
 * before that: a late write would change a block that the guest has written
 * meanwhile. A completion of such a request is refused.
 * Before VHOST_SET_FEATURES turns the dirty log on, the user completes all
 * punted requests: those that were taken without it are not logged.
 */
struct vhost_blk_punted {
	__u32 queue;
	__u32 head;
};

/**
 * struct vhost_blk_completion - a punted request is complete; write(2)
 * @queue: its ring
 * @head: its head
 * @length: bytes that were written to its buffers, the status included
 *
 * write() returns the bytes of the completions that were taken. EINVAL: the
 * next is of no request that the user has read, or is too long.
 */
struct vhost_blk_completion {
	__u32 queue;
	__u32 head;
	__u32 length;
};

/*
 * The numbers of Virtuozzo's vhost-blk. SET_BACKEND attaches the block device
 * fd and starts every ring whose addresses are set, or, with fd -1, stops all
 * rings and detaches; index is not looked at.
 */
#define VHOST_BLK_SET_BACKEND	_IOW(VHOST_VIRTIO, 0xFF, struct vhost_vring_file)
/*
 * Accepted without effect; EINVAL below 1. The kernel's vhost lets a program
 * make workers, by VHOST_NEW_WORKER and VHOST_ATTACH_VRING_WORKER, and has no
 * such call for a driver: it takes their arguments from the program's memory.
 */
#define VHOST_BLK_SET_NWORKERS	_IOW(VHOST_VIRTIO, 0x1F, int)

#endif

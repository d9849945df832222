// SPDX-License-Identifier: GPL-2.0-only
/*
 * /dev/vhost-blk: the device node and its ioctls.
 *
 * The device holds its disk exclusively until every request is published in
 * the guest's used ring. A process that takes over from one that was killed
 * gets EBUSY until then, and after that a used ring that does not change.
 */
#include <linux/compat.h>
#include <linux/file.h>
#include <linux/miscdevice.h>
#include <linux/module.h>

#include "vhost_blk.h"
#include "vhost-layout.h"

#define CREATE_TRACE_POINTS
#include "trace.h"

#define WEIGHT	256

/* Up to which feature SET_FEATURES may go; the config space is the user's. */
#define FEATURES \
	(BIT_ULL(VIRTIO_F_NOTIFY_ON_EMPTY) | \
	 BIT_ULL(VIRTIO_RING_F_INDIRECT_DESC) | \
	 BIT_ULL(VIRTIO_RING_F_EVENT_IDX) | BIT_ULL(VHOST_F_LOG_ALL) | \
	 BIT_ULL(VIRTIO_F_ANY_LAYOUT) | BIT_ULL(VIRTIO_F_VERSION_1) | \
	 BIT_ULL(VIRTIO_BLK_F_SIZE_MAX) | BIT_ULL(VIRTIO_BLK_F_SEG_MAX) | \
	 BIT_ULL(VIRTIO_BLK_F_GEOMETRY) | BIT_ULL(VIRTIO_BLK_F_RO) | \
	 BIT_ULL(VIRTIO_BLK_F_BLK_SIZE) | BIT_ULL(VIRTIO_BLK_F_TOPOLOGY) | \
	 BIT_ULL(VIRTIO_BLK_F_FLUSH) | BIT_ULL(VIRTIO_BLK_F_CONFIG_WCE) | \
	 BIT_ULL(VIRTIO_BLK_F_MQ) | BIT_ULL(VIRTIO_BLK_F_DISCARD) | \
	 BIT_ULL(VIRTIO_BLK_F_WRITE_ZEROES))

static unsigned int queues = 16;
module_param(queues, uint, 0444);
MODULE_PARM_DESC(queues, "Rings of a device, 1 to 256 (16)");

struct workqueue_struct *vhost_blk_wq;

/* The disk was removed by surprise: its requests fail; tell the user. */
static void mark_disk_dead(struct block_device *disk, bool surprise)
	__releases(&disk->bd_holder_lock)
{
	struct vhost_blk *blk = disk->bd_holder;
	unsigned int i;

	for (i = 0; i < blk->nr_queues; i++) {
		struct vhost_virtqueue *vq = &blk->queues[i].vq;

		mutex_lock(&vq->mutex);
		if (vq->error_ctx)
			eventfd_signal(vq->error_ctx);
		mutex_unlock(&vq->mutex);
	}
	mutex_unlock(&disk->bd_holder_lock);
}

static const struct blk_holder_ops vhost_blk_holder_ops = {
	.mark_dead = mark_disk_dead,
};

static bool is_running(const struct vhost_blk *blk)
{
	unsigned int i;

	for (i = 0; i < blk->nr_queues; i++)
		if (blk->queues[i].reqs)
			return true;
	return false;
}

static void detach_disk(struct vhost_blk *blk)
{
	if (!blk->disk)
		return;
	vhost_blk_stop_changes(blk);
	vhost_blk_stop_map(blk);
	/* Another opener's cache does not know what the guest has written. */
	invalidate_bdev(file_bdev(blk->disk));
	bdev_fput(blk->disk);
	blk->disk = NULL;
}

static int attach_disk(struct vhost_blk *blk, int fd)
{
	blk_mode_t mode = BLK_OPEN_READ;
	struct file *named, *disk;
	int error = 0;

	if (blk->disk)
		return -EBUSY;
	named = fget(fd);
	if (!named)
		return -EBADF;
	if (!S_ISBLK(file_inode(named)->i_mode)) {
		error = -ENOTBLK;
	} else if (!(named->f_mode & FMODE_READ)) {
		error = -EBADF;
	} else {
		if (named->f_mode & FMODE_WRITE)
			mode |= BLK_OPEN_WRITE;
		disk = bdev_file_open_by_dev(file_inode(named)->i_rdev, mode,
					     blk, &vhost_blk_holder_ops);
		error = PTR_ERR_OR_ZERO(disk);
	}
	fput(named);
	if (error)
		return error;
	/* Dirty pages of another opener's cache would overwrite the guest. */
	error = bdev_is_zoned(file_bdev(disk)) ? -EOPNOTSUPP :
		sync_blockdev(file_bdev(disk));
	if (error) {
		bdev_fput(disk);
		return error;
	}
	invalidate_bdev(file_bdev(disk));
	blk->disk = disk;
	blk->is_disk_read_only = !(mode & BLK_OPEN_WRITE) ||
				 bdev_read_only(file_bdev(disk));
	return 0;
}

static void stop_all(struct vhost_blk *blk)
{
	unsigned int i;

	for (i = 0; i < blk->nr_queues; i++)
		vhost_blk_stop_queue(&blk->queues[i]);
}

static long set_disk(struct vhost_blk *blk, int fd)
{
	if (fd != VHOST_FILE_UNBIND)
		return attach_disk(blk, fd);
	if (is_running(blk))
		return -EBUSY;
	detach_disk(blk);
	return 0;
}

/* Virtuozzo's: one call attaches the disk and starts all rings, or ends both. */
static long set_backend(struct vhost_blk *blk, int fd)
{
	unsigned int i;
	long error;

	stop_all(blk);
	detach_disk(blk);
	if (fd == VHOST_FILE_UNBIND)
		return 0;
	error = attach_disk(blk, fd);
	for (i = 0; i < blk->nr_queues && !error; i++)
		if (blk->queues[i].vq.desc)
			error = vhost_blk_start_queue(&blk->queues[i]);
	if (error) {
		stop_all(blk);
		detach_disk(blk);
	}
	return error;
}

struct vhost_blk_queue *vhost_blk_find_queue(struct vhost_blk *blk, u32 index)
{
	if (index >= blk->nr_queues)
		return NULL;
	return &blk->queues[array_index_nospec(index, blk->nr_queues)];
}

static long start_or_stop(struct vhost_blk *blk, bool starts,
			  const struct vhost_vring_state *state)
{
	struct vhost_blk_queue *queue = vhost_blk_find_queue(blk, state->index);

	if (!queue)
		return -ENOBUFS;
	if (state->num)
		return -EINVAL;
	if (!starts) {
		vhost_blk_stop_queue(queue);
		return 0;
	}
	if (!blk->disk)
		return -ENODEV;
	if (queue->reqs)
		return -EBUSY;
	return vhost_blk_start_queue(queue);
}

/* Does something while no request is in flight; rings run on after it. */
void vhost_blk_pause(struct vhost_blk *blk)
{
	unsigned int i;

	for (i = 0; i < blk->nr_queues; i++)
		if (blk->queues[i].reqs)
			vhost_blk_pause_queue(&blk->queues[i]);
}

void vhost_blk_resume(struct vhost_blk *blk)
{
	unsigned int i;

	for (i = 0; i < blk->nr_queues; i++)
		if (blk->queues[i].reqs)
			vhost_blk_resume_queue(&blk->queues[i]);
}

static long set_config(struct vhost_blk *blk,
		       const struct vhost_blk_config *config)
{
	if (config->flags & ~(VHOST_BLK_CONFIG_READ_ONLY |
			      VHOST_BLK_CONFIG_WRITE_THROUGH))
		return -EINVAL;
	vhost_blk_pause(blk);
	blk->config = *config;
	vhost_blk_resume(blk);
	return 0;
}

static long get_stats(struct vhost_blk *blk, struct vhost_blk_stats *stats)
{
	struct vhost_blk_queue *queue = vhost_blk_find_queue(blk, stats->index);
	u32 index = stats->index;

	if (!queue)
		return -ENOBUFS;
	mutex_lock(&queue->vq.mutex);
	*stats = queue->stats;
	stats->index = index;
	stats->inflight = atomic_read(&queue->inflight) + queue->unpublished;
	mutex_unlock(&queue->vq.mutex);
	return 0;
}

/* A request that was taken before the dirty log is on would not be in it. */
static long set_features(struct vhost_blk *blk, u64 features)
{
	unsigned int i;

	if (features & ~FEATURES)
		return -EOPNOTSUPP;
	if (features & BIT_ULL(VHOST_F_LOG_ALL) &&
	    !vhost_log_access_ok(&blk->dev))
		return -EFAULT;
	vhost_blk_pause(blk);
	for (i = 0; i < blk->nr_queues; i++) {
		struct vhost_virtqueue *vq = &blk->queues[i].vq;

		mutex_lock(&vq->mutex);
		vq->acked_features = features;
		mutex_unlock(&vq->mutex);
	}
	vhost_blk_resume(blk);
	return 0;
}

static long reset_owner(struct vhost_blk *blk)
{
	struct vhost_iotlb *memory;

	memory = vhost_dev_reset_owner_prepare();
	if (!memory)
		return -ENOMEM;
	stop_all(blk);
	detach_disk(blk);
	vhost_dev_stop(&blk->dev);
	vhost_dev_reset_owner(&blk->dev, memory);
	return 0;
}

/*
 * Status bytes and bounced data are written to addresses of the old table:
 * requests in flight end before it changes.
 */
static long set_memory(struct vhost_blk *blk, void __user *argp)
{
	long error;

	vhost_blk_pause(blk);
	error = vhost_dev_ioctl(&blk->dev, VHOST_SET_MEM_TABLE, argp);
	vhost_blk_resume(blk);
	return error;
}

/* The ioctls of this driver; the owner's, with the device's mutex held. */
static long blk_ioctl(struct vhost_blk *blk, unsigned int ioctl,
		      void __user *argp)
{
	union {
		int fd;
		u64 features;
		struct vhost_vring_file file;
		struct vhost_vring_state state;
		struct vhost_blk_config config;
		struct vhost_blk_stats stats;
		struct vhost_blk_changes changes;
		struct vhost_blk_map map;
	} arg;
	long error;

	if (_IOC_DIR(ioctl) & _IOC_WRITE &&
	    copy_from_user(&arg, argp, _IOC_SIZE(ioctl)))
		return -EFAULT;
	switch (ioctl) {
	case VHOST_SET_FEATURES:
		return set_features(blk, arg.features);
	case VHOST_BLK_SET_DISK:
		return set_disk(blk, arg.fd);
	case VHOST_BLK_START_VRING:
		return start_or_stop(blk, true, &arg.state);
	case VHOST_BLK_STOP_VRING:
		return start_or_stop(blk, false, &arg.state);
	case VHOST_BLK_SET_CONFIG:
		return set_config(blk, &arg.config);
	case VHOST_BLK_GET_STATS:
		error = get_stats(blk, &arg.stats);
		if (!error && copy_to_user(argp, &arg.stats, sizeof(arg.stats)))
			error = -EFAULT;
		return error;
	case VHOST_BLK_SET_CHANGES:
		return vhost_blk_set_changes(blk, &arg.changes);
	case VHOST_BLK_STOP_CHANGES:
		return vhost_blk_stop_changes(blk);
	case VHOST_BLK_SET_MAP:
		return vhost_blk_set_map(blk, &arg.map);
	case VHOST_BLK_STOP_MAP:
		return vhost_blk_stop_map(blk);
	case VHOST_BLK_SET_BACKEND:
		return set_backend(blk, arg.file.fd);
	case VHOST_BLK_SET_NWORKERS:
		return arg.fd > 0 ? 0 : -EINVAL;
	case VHOST_RESET_OWNER:
		return reset_owner(blk);
	default:
		return -ENOIOCTLCMD;
	}
}

static long vhost_blk_ioctl(struct file *file, unsigned int ioctl,
			    unsigned long arg)
{
	struct vhost_blk *blk = file->private_data;
	void __user *argp = (void __user *)arg;
	u64 features = FEATURES;
	long error;

	if (ioctl == VHOST_GET_FEATURES)
		return copy_to_user(argp, &features, sizeof(features)) ?
			-EFAULT : 0;
	mutex_lock(&blk->dev.mutex);
	switch (ioctl) {
	case VHOST_NEW_WORKER:
	case VHOST_FREE_WORKER:
	case VHOST_ATTACH_VRING_WORKER:
	case VHOST_GET_VRING_WORKER:
		error = vhost_worker_ioctl(&blk->dev, ioctl, argp);
		break;
	case VHOST_SET_FEATURES:
	case VHOST_RESET_OWNER:
	case VHOST_BLK_SET_DISK:
	case VHOST_BLK_START_VRING:
	case VHOST_BLK_STOP_VRING:
	case VHOST_BLK_SET_CONFIG:
	case VHOST_BLK_GET_STATS:
	case VHOST_BLK_SET_CHANGES:
	case VHOST_BLK_STOP_CHANGES:
	case VHOST_BLK_SET_MAP:
	case VHOST_BLK_STOP_MAP:
	case VHOST_BLK_SET_BACKEND:
	case VHOST_BLK_SET_NWORKERS:
	case VHOST_SET_MEM_TABLE:
		error = vhost_dev_check_owner(&blk->dev);
		if (error)
			break;
		error = ioctl == VHOST_SET_MEM_TABLE ? set_memory(blk, argp) :
			blk_ioctl(blk, ioctl, argp);
		break;
	default:
		error = vhost_dev_ioctl(&blk->dev, ioctl, argp);
		if (error == -ENOIOCTLCMD)
			error = vhost_vring_ioctl(&blk->dev, ioctl, argp);
	}
	mutex_unlock(&blk->dev.mutex);
	return error;
}

static int vhost_blk_open(struct inode *inode, struct file *file)
{
	struct vhost_virtqueue **vqs;
	struct vhost_blk *blk;
	unsigned int i;

	blk = kvzalloc(struct_size(blk, queues, queues), GFP_KERNEL_ACCOUNT);
	if (!blk)
		return -ENOMEM;
	vqs = kmalloc_array(queues, sizeof(*vqs), GFP_KERNEL_ACCOUNT);
	if (!vqs) {
		kvfree(blk);
		return -ENOMEM;
	}
	blk->nr_queues = queues;
	init_waitqueue_head(&blk->drained);
	init_waitqueue_head(&blk->has_punted);
	for (i = 0; i < queues; i++) {
		vhost_blk_init_queue(blk, &blk->queues[i]);
		vqs[i] = &blk->queues[i].vq;
	}
	vhost_dev_init(&blk->dev, vqs, queues, UIO_MAXIOV, WEIGHT, 0, true,
		       NULL);
	file->private_data = blk;
	return nonseekable_open(inode, file);
}

/*
 * Also runs at the end of a process that was killed: requests end, their
 * results are published, the disk is free. In this order.
 */
static int vhost_blk_release(struct inode *inode, struct file *file)
{
	struct vhost_blk *blk = file->private_data;

	mutex_lock(&blk->dev.mutex);
	stop_all(blk);
	vhost_dev_stop(&blk->dev);
	/* Needs the owner's memory. */
	vhost_blk_stop_changes(blk);
	vhost_dev_cleanup(&blk->dev);
	detach_disk(blk);
	mutex_unlock(&blk->dev.mutex);
	kfree(blk->dev.vqs);
	kvfree(blk);
	return 0;
}

static const struct file_operations vhost_blk_fops = {
	.owner = THIS_MODULE,
	.open = vhost_blk_open,
	.release = vhost_blk_release,
	.read = vhost_blk_read,
	.write = vhost_blk_write,
	.poll = vhost_blk_poll,
	.unlocked_ioctl = vhost_blk_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.llseek = noop_llseek,
};

static struct miscdevice vhost_blk_misc = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "vhost-blk",
	.fops = &vhost_blk_fops,
};

static int __init vhost_blk_init(void)
{
	int error;

	if (queues < 1 || queues > 256)
		return -EINVAL;
	vhost_blk_wq = alloc_workqueue("vhost_blk", WQ_UNBOUND, 0);
	if (!vhost_blk_wq)
		return -ENOMEM;
	error = misc_register(&vhost_blk_misc);
	if (error)
		destroy_workqueue(vhost_blk_wq);
	return error;
}

static void __exit vhost_blk_exit(void)
{
	misc_deregister(&vhost_blk_misc);
	destroy_workqueue(vhost_blk_wq);
}

module_init(vhost_blk_init);
module_exit(vhost_blk_exit);

MODULE_DESCRIPTION("virtio-blk served by the host's kernel from a block device");
MODULE_AUTHOR("Freestone");
MODULE_LICENSE("GPL");

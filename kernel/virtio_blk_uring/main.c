// SPDX-License-Identifier: GPL-2.0-only
/*
 * Nodes /dev/vdXc0 for the disks of the stock driver virtio_blk.
 *
 * A node appears after the driver has made its disk, and is gone before the
 * driver takes the disk away. It holds nothing of the disk; an open node holds
 * the disk as an opener of /dev/vdX does.
 */
#include <linux/glob.h>
#include <linux/idr.h>
#include <linux/module.h>
#include <linux/virtio.h>
#include <linux/virtio_config.h>

#include "virtio_blk_uring.h"
#include "virtio-blk-layout.h"

#define DRIVER		"virtio_blk"
#define PATTERN_BYTES	256

/* Of struct scatterlist, behind each request; the stock driver's number. */
#ifdef CONFIG_ARCH_NO_SG_CHAIN
#define INLINE_SEGMENTS	0
#else
#define INLINE_SEGMENTS	2
#endif
#define REQUEST_BYTES \
	(sizeof(struct virtblk_req) + \
	 INLINE_SEGMENTS * sizeof(struct scatterlist))

/* Ranges of a discard or write zeroes request, whatever the device takes. */
#define MAX_RANGES	256

/**
 * struct vbu_disk - a disk that the driver serves
 * @entry: in disks
 * @vdev: its device
 * @disk: the disk
 * @node: its node, or NULL
 */
struct vbu_disk {
	struct list_head entry;
	struct virtio_device *vdev;
	struct gendisk *disk;
	struct vbu_node *node;
};

/* Guards disks and patterns. */
static DEFINE_MUTEX(lock);
static LIST_HEAD(disks);
static char patterns[PATTERN_BYTES];

static dev_t first_number;
static DEFINE_IDA(minors);

static void vbu_release_node(struct device *dev)
{
	struct vbu_node *node = container_of(dev, struct vbu_node, dev);

	ida_free(&minors, MINOR(dev->devt));
	kfree(node);
}

static const struct class vbu_class = {
	.name = "virtio_blk_uring",
	.dev_release = vbu_release_node,
};

static int vbu_open(struct inode *inode, struct file *file)
{
	struct vbu_node *node =
		container_of(inode->i_cdev, struct vbu_node, cdev);
	blk_mode_t mode = BLK_OPEN_READ;
	struct vbu_open *open;
	int error = 0;

	if (READ_ONCE(node->is_gone))
		return -ENODEV;
	open = kzalloc(sizeof(*open), GFP_KERNEL_ACCOUNT);
	if (!open)
		return -ENOMEM;
	if (file->f_mode & FMODE_WRITE)
		mode |= BLK_OPEN_WRITE;
	open->node = node;
	open->disk = bdev_file_open_by_dev(node->disk_number, mode, NULL, NULL);
	if (IS_ERR(open->disk)) {
		error = PTR_ERR(open->disk);
		goto free;
	}
	/* The number may be another disk's by now. */
	if (vbu_bdev(open)->bd_disk != node->disk ||
	    READ_ONCE(node->is_gone)) {
		error = -ENODEV;
		goto close;
	}
	/* Requests do not see the cache of the disk's other openers. */
	error = sync_blockdev(vbu_bdev(open));
	if (error)
		goto close;
	if (mode & BLK_OPEN_WRITE)
		invalidate_bdev(vbu_bdev(open));
	file->private_data = open;
	return nonseekable_open(inode, file);

close:
	bdev_fput(open->disk);
free:
	kfree(open);
	return error;
}

static int vbu_release(struct inode *inode, struct file *file)
{
	struct vbu_open *open = file->private_data;

	if (file->f_mode & FMODE_WRITE)
		invalidate_bdev(vbu_bdev(open));
	bdev_fput(open->disk);
	kfree(open);
	return 0;
}

static unsigned int count_queues(const struct request_queue *q,
				 enum hctx_type type)
{
	const struct blk_mq_tag_set *set = q->tag_set;

	return type < set->nr_maps ? set->map[type].nr_queues : 0;
}

static long get_info(struct vbu_open *open, struct virtblk_info __user *argp)
{
	const struct vbu_limits *limits = &open->node->limits;
	struct block_device *bdev = vbu_bdev(open);
	struct request_queue *q = bdev_get_queue(bdev);
	struct virtblk_info info = {
		.capacity = get_capacity(bdev->bd_disk),
		.features = limits->features,
		.block_bytes = bdev_logical_block_size(bdev),
		.physical_block_bytes = bdev_physical_block_size(bdev),
		.optimal_io_bytes = bdev_io_opt(bdev),
		.buffer_align = bdev_dma_alignment(bdev) + 1,
		.max_bytes = vbu_max_bytes(q),
		.max_segments = queue_max_segments(q),
		.max_segment_bytes = queue_max_segment_size(q),
		.max_discard_sectors = limits->max_discard_sectors,
		.max_discard_ranges = limits->max_discard_ranges,
		.discard_align_sectors = limits->discard_align_sectors,
		.max_write_zeroes_sectors = limits->max_write_zeroes_sectors,
		.max_write_zeroes_ranges = limits->max_write_zeroes_ranges,
		.queues = count_queues(q, HCTX_TYPE_DEFAULT) +
			  count_queues(q, HCTX_TYPE_READ),
		.poll_queues = count_queues(q, HCTX_TYPE_POLL),
	};

	if (READ_ONCE(open->node->is_gone) ||
	    vbu_get_serial(open, info.serial) == -ENODEV)
		return -ENODEV;
	if (bdev_read_only(bdev))
		info.flags |= VIRTBLK_INFO_READ_ONLY;
	if (bdev_write_cache(bdev))
		info.flags |= VIRTBLK_INFO_WRITE_CACHE;
	if (info.poll_queues)
		info.flags |= VIRTBLK_INFO_POLL;
	return copy_to_user(argp, &info, sizeof(info)) ? -EFAULT : 0;
}

static long vbu_ioctl(struct file *file, unsigned int ioctl, unsigned long arg)
{
	if (ioctl != VIRTBLK_GET_INFO)
		return -ENOTTY;
	return get_info(file->private_data, (void __user *)arg);
}

static const struct file_operations vbu_fops = {
	.owner = THIS_MODULE,
	.open = vbu_open,
	.release = vbu_release,
	.unlocked_ioctl = vbu_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.uring_cmd = vbu_uring_cmd,
	.uring_cmd_iopoll = vbu_uring_cmd_iopoll,
};

static u32 or_default(u32 value, u32 otherwise)
{
	return value ? value : otherwise;
}

/* The device's configuration can be read while the driver serves it only. */
static void read_limits(struct virtio_device *vdev, struct vbu_limits *limits)
{
	u32 sectors, ranges, align;

	limits->features = vdev->features;
	limits->is_little_endian = virtio_legacy_is_little_endian() ||
		virtio_has_feature(vdev, VIRTIO_F_VERSION_1);
	/* The defaults are the stock driver's. */
	if (virtio_has_feature(vdev, VIRTIO_BLK_F_DISCARD)) {
		virtio_cread(vdev, struct virtio_blk_config,
			     max_discard_sectors, &sectors);
		virtio_cread(vdev, struct virtio_blk_config, max_discard_seg,
			     &ranges);
		virtio_cread(vdev, struct virtio_blk_config,
			     discard_sector_alignment, &align);
		limits->max_discard_sectors = or_default(sectors, UINT_MAX);
		limits->max_discard_ranges =
			min_t(u32, or_default(ranges, 1), MAX_RANGES);
		limits->discard_align_sectors = align;
	}
	if (virtio_has_feature(vdev, VIRTIO_BLK_F_WRITE_ZEROES)) {
		virtio_cread(vdev, struct virtio_blk_config,
			     max_write_zeroes_sectors, &sectors);
		virtio_cread(vdev, struct virtio_blk_config,
			     max_write_zeroes_seg, &ranges);
		limits->max_write_zeroes_sectors =
			or_default(sectors, UINT_MAX);
		limits->max_write_zeroes_ranges =
			min_t(u32, or_default(ranges, 1), MAX_RANGES);
	}
}

static void add_node(struct vbu_disk *entry)
{
	struct vbu_node *node;
	int minor, error;

	if (entry->node)
		return;
	node = kzalloc(sizeof(*node), GFP_KERNEL);
	if (!node) {
		error = -ENOMEM;
		goto failed;
	}
	minor = ida_alloc_max(&minors, MINORMASK, GFP_KERNEL);
	if (minor < 0) {
		error = minor;
		kfree(node);
		goto failed;
	}
	node->disk = entry->disk;
	node->disk_number = disk_devt(entry->disk);
	read_limits(entry->vdev, &node->limits);
	device_initialize(&node->dev);
	node->dev.class = &vbu_class;
	node->dev.parent = &entry->vdev->dev;
	node->dev.devt = MKDEV(MAJOR(first_number), minor);
	cdev_init(&node->cdev, &vbu_fops);
	node->cdev.owner = THIS_MODULE;
	error = dev_set_name(&node->dev, "%sc0", entry->disk->disk_name);
	if (!error)
		error = cdev_device_add(&node->cdev, &node->dev);
	if (error) {
		put_device(&node->dev);
		goto failed;
	}
	entry->node = node;
	return;

failed:
	dev_warn(&entry->vdev->dev, "no node %sc0: error %d\n",
		 entry->disk->disk_name, error);
}

/* Programs that have it open go on, unless the disk is gone, too. */
static void remove_node(struct vbu_disk *entry, bool is_gone)
{
	if (!entry->node)
		return;
	if (is_gone)
		WRITE_ONCE(entry->node->is_gone, true);
	cdev_device_del(&entry->node->cdev, &entry->node->dev);
	put_device(&entry->node->dev);
	entry->node = NULL;
}

static bool is_wanted(const char *name)
{
	char copy[PATTERN_BYTES], *rest = copy, *pattern;

	strscpy(copy, patterns, sizeof(copy));
	while ((pattern = strsep(&rest, ",")))
		if (glob_match(pattern, name))
			return true;
	return false;
}

static void match_node(struct vbu_disk *entry)
{
	if (is_wanted(entry->disk->disk_name))
		add_node(entry);
	else
		remove_node(entry, false);
}

static int set_patterns(const char *value, const struct kernel_param *param)
{
	struct vbu_disk *entry;

	if (strlen(value) >= sizeof(patterns))
		return -ENOSPC;
	mutex_lock(&lock);
	strscpy(patterns, value, sizeof(patterns));
	strim(patterns);
	list_for_each_entry(entry, &disks, entry)
		match_node(entry);
	mutex_unlock(&lock);
	return 0;
}

static int get_patterns(char *buffer, const struct kernel_param *param)
{
	int len;

	mutex_lock(&lock);
	len = sysfs_emit(buffer, "%s\n", patterns);
	mutex_unlock(&lock);
	return len;
}

static const struct kernel_param_ops patterns_ops = {
	.set = set_patterns,
	.get = get_patterns,
};
module_param_cb(disks, &patterns_ops, NULL, 0644);
MODULE_PARM_DESC(disks, "Disks that get a node: names or patterns with *, ? and [], separated by commas");

static int find_disk(struct device *dev, void *found)
{
	if (!dev->class || strcmp(dev->class->name, "block"))
		return 0;
	*(struct gendisk **)found = dev_to_disk(dev);
	return 1;
}

static struct vbu_disk *find_entry(const struct virtio_device *vdev)
{
	struct vbu_disk *entry;

	list_for_each_entry(entry, &disks, entry)
		if (entry->vdev == vdev)
			return entry;
	return NULL;
}

static void add_disk_of(struct virtio_device *vdev)
{
	struct gendisk *disk = NULL;
	struct vbu_disk *entry;

	if (strcmp(vdev->dev.driver->name, DRIVER) ||
	    !device_for_each_child(&vdev->dev, &disk, find_disk))
		return;
	if (disk->queue->tag_set->cmd_size != REQUEST_BYTES) {
		dev_warn(&vdev->dev, "no node for %s: its driver is not the one that this module was built for\n",
			 disk->disk_name);
		return;
	}
	mutex_lock(&lock);
	entry = find_entry(vdev);
	if (!entry) {
		entry = kzalloc(sizeof(*entry), GFP_KERNEL);
		if (entry) {
			entry->vdev = vdev;
			entry->disk = disk;
			list_add_tail(&entry->entry, &disks);
			match_node(entry);
		}
	}
	mutex_unlock(&lock);
}

static void forget_disk(struct vbu_disk *entry, bool is_gone)
{
	remove_node(entry, is_gone);
	list_del(&entry->entry);
	kfree(entry);
}

static void remove_disk_of(struct virtio_device *vdev)
{
	struct vbu_disk *entry;

	mutex_lock(&lock);
	entry = find_entry(vdev);
	if (entry)
		forget_disk(entry, true);
	mutex_unlock(&lock);
}

static int vbu_notify(struct notifier_block *block, unsigned long event,
		      void *dev)
{
	if (event == BUS_NOTIFY_BOUND_DRIVER)
		add_disk_of(dev_to_virtio(dev));
	else if (event == BUS_NOTIFY_UNBIND_DRIVER)
		remove_disk_of(dev_to_virtio(dev));
	return NOTIFY_DONE;
}

static struct notifier_block vbu_notifier = {
	.notifier_call = vbu_notify,
};

static int add_present_disk(struct device *dev, void *unused)
{
	/* Not while the driver binds or leaves the device. */
	device_lock(dev);
	if (device_is_bound(dev))
		add_disk_of(dev_to_virtio(dev));
	device_unlock(dev);
	return 0;
}

static int vbu_probe(struct virtio_device *vdev)
{
	return -ENODEV;
}

static void vbu_remove(struct virtio_device *vdev)
{
}

/* Serves no device: a registered driver knows the virtio bus. */
static const struct virtio_device_id no_device[] = { { 0 } };
static struct virtio_driver vbu_driver = {
	.driver.name = KBUILD_MODNAME,
	.id_table = no_device,
	.probe = vbu_probe,
	.remove = vbu_remove,
};

static int __init vbu_init(void)
{
	int error;

	error = alloc_chrdev_region(&first_number, 0, MINORMASK + 1,
				    KBUILD_MODNAME);
	if (error)
		return error;
	error = class_register(&vbu_class);
	if (error)
		goto free_numbers;
	error = register_virtio_driver(&vbu_driver);
	if (error)
		goto free_class;
	error = bus_register_notifier(vbu_driver.driver.bus, &vbu_notifier);
	if (error)
		goto free_driver;
	bus_for_each_dev(vbu_driver.driver.bus, NULL, NULL, add_present_disk);
	return 0;

free_driver:
	unregister_virtio_driver(&vbu_driver);
free_class:
	class_unregister(&vbu_class);
free_numbers:
	unregister_chrdev_region(first_number, MINORMASK + 1);
	return error;
}

static void __exit vbu_exit(void)
{
	struct vbu_disk *entry, *next;

	bus_unregister_notifier(vbu_driver.driver.bus, &vbu_notifier);
	mutex_lock(&lock);
	list_for_each_entry_safe(entry, next, &disks, entry)
		forget_disk(entry, false);
	mutex_unlock(&lock);
	unregister_virtio_driver(&vbu_driver);
	class_unregister(&vbu_class);
	unregister_chrdev_region(first_number, MINORMASK + 1);
	ida_destroy(&minors);
}

module_init(vbu_init);
module_exit(vbu_exit);
MODULE_DESCRIPTION("Requests to virtio-blk disks by io_uring commands");
MODULE_LICENSE("GPL");

// SPDX-License-Identifier: GPL-2.0-only
/*
 * A command: checked here, not by the device, and made a request of the stock
 * driver's queue.
 *
 * Every request is a REQ_OP_DRV_IN, whose header the stock driver leaves as it
 * is: it takes the direction of the data from the header's type.
 */
#include <linux/capability.h>
#include <linux/compat.h>
#include <linux/ioprio.h>
#include <linux/uio.h>
#include <linux/virtio_byteorder.h>

#include "compat.h"
#include "virtio_blk_uring.h"

/* A status that no device writes: the request was not answered. */
#define STATUS_UNSET	0xff

#define RANGE_BYTES	sizeof(struct virtio_blk_discard_write_zeroes)

/**
 * struct vbu_cmd - a command, read once from the program's memory
 * @sector: first sector
 * @data: address of the buffer or of the array of buffers
 * @type: VIRTIO_BLK_T_*
 * @ioprio: priority
 * @len: bytes of the buffer or number of buffers
 * @is_vec: an array of buffers
 * @is_fixed: the buffer is a registered one
 */
struct vbu_cmd {
	u64 sector;
	u64 data;
	u32 type;
	u32 ioprio;
	u32 len;
	bool is_vec;
	bool is_fixed;
};

/**
 * struct vbu_payload - data that goes through memory of the kernel
 * @user: where the result is copied to, or NULL: the data is for the device
 * @user_len: bytes of the result
 * @data: the data
 */
struct vbu_payload {
	void __user *user;
	u32 user_len;
	u8 data[];
};

/**
 * struct vbu_pdu - the state of a command in flight
 * @bio: the program's memory, or NULL
 * @payload: the kernel's memory, or NULL
 * @rq: the request, or NULL as soon as it has ended
 * @result: 0 or an error
 */
struct vbu_pdu {
	struct bio *bio;
	struct vbu_payload *payload;
	struct request *rq;
	int result;
};

static struct vbu_pdu *pdu_of(struct io_uring_cmd *ioucmd)
{
	return io_uring_cmd_to_pdu(ioucmd, struct vbu_pdu);
}

static int read_long_form(const struct io_uring_sqe *sqe, struct vbu_cmd *cmd)
{
	const struct virtblk_uring_cmd *from = vbu_payload_of(sqe);

	cmd->type = READ_ONCE(from->type);
	cmd->ioprio = READ_ONCE(from->ioprio);
	cmd->sector = READ_ONCE(from->sector);
	cmd->data = READ_ONCE(from->data);
	cmd->len = READ_ONCE(from->data_len);
	return READ_ONCE(from->flag) > cmd->is_vec ? -EINVAL : 0;
}

static void read_compact_form(const struct io_uring_sqe *sqe,
			      struct vbu_cmd *cmd)
{
	const struct virtblk_uring_compact *from = vbu_payload_of(sqe);

	cmd->type = READ_ONCE(from->type);
	cmd->ioprio = READ_ONCE(from->ioprio);
	cmd->sector = READ_ONCE(from->sector);
	cmd->data = READ_ONCE(sqe->addr);
	cmd->len = READ_ONCE(sqe->len);
}

static int read_command(const struct io_uring_cmd *ioucmd,
			unsigned int issue_flags, struct vbu_cmd *cmd)
{
	if (ioucmd->flags & IORING_URING_CMD_MASK & ~IORING_URING_CMD_FIXED)
		return -EINVAL;
	cmd->is_fixed = ioucmd->flags & IORING_URING_CMD_FIXED;
	cmd->is_vec = ioucmd->cmd_op == VIRTBLK_URING_CMD_IO_VEC ||
		      ioucmd->cmd_op == VIRTBLK_URING_CMD_COMPACT_VEC;
	switch (ioucmd->cmd_op) {
	case VIRTBLK_URING_CMD_IO:
	case VIRTBLK_URING_CMD_IO_VEC:
		/* The form is longer than an SQE of 64 bytes. */
		if (!(issue_flags & IO_URING_F_SQE128))
			return -EINVAL;
		return read_long_form(ioucmd->sqe, cmd);
	case VIRTBLK_URING_CMD_COMPACT:
	case VIRTBLK_URING_CMD_COMPACT_VEC:
		read_compact_form(ioucmd->sqe, cmd);
		return 0;
	default:
		return -EOPNOTSUPP;
	}
}

/* What the block layer's own requests are held to. */
static int check_priority(u32 ioprio)
{
	if (ioprio > U16_MAX)
		return -EINVAL;
	switch (IOPRIO_PRIO_CLASS(ioprio)) {
	case IOPRIO_CLASS_RT:
		return capable(CAP_SYS_ADMIN) || capable(CAP_SYS_NICE) ?
			0 : -EPERM;
	case IOPRIO_CLASS_BE:
	case IOPRIO_CLASS_IDLE:
		return 0;
	default:
		return ioprio ? -EINVAL : 0;
	}
}

static int check_access(const struct vbu_open *open, const struct file *file,
			u32 type)
{
	switch (type) {
	case VIRTIO_BLK_T_IN:
		return file->f_mode & FMODE_READ ? 0 : -EBADF;
	case VIRTIO_BLK_T_OUT:
	case VIRTIO_BLK_T_DISCARD:
	case VIRTIO_BLK_T_WRITE_ZEROES:
		if (!(file->f_mode & FMODE_WRITE))
			return -EBADF;
		return bdev_read_only(vbu_bdev(open)) ? -EROFS : 0;
	default:
		return 0;
	}
}

static int check_range(const struct vbu_open *open, u64 sector, u64 sectors)
{
	struct block_device *bdev = vbu_bdev(open);
	u64 capacity = get_capacity(bdev->bd_disk);
	u32 block = bdev_logical_block_size(bdev) >> SECTOR_SHIFT;

	if (!sectors || (sector | sectors) & (block - 1))
		return -EINVAL;
	if (sector > capacity || sectors > capacity - sector)
		return READ_ONCE(open->node->is_gone) ? -ENODEV : -ENOSPC;
	return 0;
}

static int result_of(struct request *rq, blk_status_t error)
{
	const struct virtblk_req *vbr = blk_mq_rq_to_pdu(rq);

	if (error)
		return blk_status_to_errno(error);
	/* A polled error may come as a success: see blk_mq_add_to_batch(). */
	switch (READ_ONCE(vbr->in_hdr.status)) {
	case VIRTIO_BLK_S_OK:
		return 0;
	case VIRTIO_BLK_S_UNSUPP:
		return -EOPNOTSUPP;
	default:
		return -EIO;
	}
}

static void vbu_complete(struct io_uring_cmd *ioucmd, unsigned int issue_flags)
{
	struct vbu_pdu *pdu = pdu_of(ioucmd);
	struct vbu_payload *payload = pdu->payload;
	int result = pdu->result;
	int error = 0;

	if (pdu->bio)
		error = blk_rq_unmap_user(pdu->bio);
	if (!result)
		result = error;
	if (payload && payload->user && !result) {
		/* No memory any more where the program has ended. */
		if (!current->mm || copy_to_user(payload->user, payload->data,
						 payload->user_len))
			result = -EFAULT;
	}
	kfree(payload);
	vbu_done(ioucmd, result, issue_flags);
}

/*
 * May be called from an interrupt, or with the virtqueue's lock held. The
 * request is free after it: a program that is stopped holds no request.
 */
static enum rq_end_io_ret vbu_end_io(VBU_END_IO_ARGS)
{
	struct io_uring_cmd *ioucmd = rq->end_io_data;
	struct vbu_pdu *pdu = pdu_of(ioucmd);

	pdu->result = result_of(rq, error);
	WRITE_ONCE(pdu->rq, NULL);
	vbu_complete_in_task(ioucmd);
	return RQ_END_IO_FREE;
}

static struct request *alloc_request(const struct vbu_open *open,
				     unsigned int issue_flags)
{
	blk_opf_t op = REQ_OP_DRV_IN | REQ_ALLOC_CACHE;
	blk_mq_req_flags_t flags = 0;
	struct request *rq;

	if (issue_flags & IO_URING_F_NONBLOCK)
		flags |= BLK_MQ_REQ_NOWAIT;
	if (issue_flags & IO_URING_F_IOPOLL)
		op |= REQ_POLLED;
	rq = blk_mq_alloc_request(bdev_get_queue(vbu_bdev(open)), op, flags);
	if (IS_ERR(rq))
		return rq;
	if (issue_flags & IO_URING_F_IOPOLL && !blk_rq_is_poll(rq)) {
		blk_mq_free_request(rq);
		return ERR_PTR(-EOPNOTSUPP);
	}
	return rq;
}

/* After the data is mapped, which sets a priority of its own. */
static void set_header(const struct vbu_open *open, struct request *rq,
		       u32 type, u64 sector, u32 ioprio)
{
	struct virtblk_req *vbr = blk_mq_rq_to_pdu(rq);
	bool is_little = open->node->limits.is_little_endian;

	vbr->out_hdr.type = __cpu_to_virtio32(is_little, type);
	vbr->out_hdr.sector = __cpu_to_virtio64(is_little, sector);
	vbr->in_hdr.status = STATUS_UNSET;
	vbr->in_hdr_len = sizeof(vbr->in_hdr.status);
	/* The stock driver puts it into the header. */
	if (rq->bio)
		rq->bio->bi_ioprio = ioprio;
}

static int start(const struct vbu_open *open, struct io_uring_cmd *ioucmd,
		 const struct vbu_cmd *cmd, struct request *rq,
		 struct bio *bio, struct vbu_payload *payload)
{
	struct vbu_pdu *pdu = pdu_of(ioucmd);

	set_header(open, rq, cmd->type, cmd->sector, cmd->ioprio);
	pdu->bio = bio;
	pdu->payload = payload;
	pdu->rq = rq;
	rq->end_io = vbu_end_io;
	rq->end_io_data = ioucmd;
	blk_execute_rq_nowait(rq, false);
	return -EIOCBQUEUED;
}

static int copy_buffers(const struct vbu_cmd *cmd, unsigned int issue_flags,
			struct iovec *iov)
{
	void __user *from = u64_to_user_ptr(cmd->data);
	u32 i;

#ifdef CONFIG_COMPAT
	if (issue_flags & IO_URING_F_COMPAT) {
		const struct compat_iovec __user *compat = from;
		struct compat_iovec one;

		for (i = 0; i < cmd->len; i++) {
			if (copy_from_user(&one, &compat[i], sizeof(one)))
				return -EFAULT;
			iov[i].iov_base = compat_ptr(one.iov_base);
			iov[i].iov_len = one.iov_len;
		}
		return 0;
	}
#endif
	return copy_from_user(iov, from, cmd->len * sizeof(*iov)) ? -EFAULT : 0;
}

static int import_buffers(const struct vbu_cmd *cmd, unsigned int issue_flags,
			  int direction, u32 max_bytes, struct iovec *iov,
			  struct iov_iter *iter)
{
	size_t bytes = 0;
	u32 i;
	int error;

	error = copy_buffers(cmd, issue_flags, iov);
	if (error)
		return error;
	for (i = 0; i < cmd->len; i++) {
		if (iov[i].iov_len > max_bytes - bytes)
			return -E2BIG;
		if (!access_ok(iov[i].iov_base, iov[i].iov_len))
			return -EFAULT;
		bytes += iov[i].iov_len;
	}
	iov_iter_init(iter, direction, iov, cmd->len, bytes);
	return 0;
}

static u32 max_hw_bytes(const struct request_queue *q)
{
	return min_t(u64, (u64)queue_max_hw_sectors(q) << SECTOR_SHIFT,
		     MAX_RW_COUNT);
}

/* Each page of a buffer may be a segment, and it may begin inside a page. */
u32 vbu_max_bytes(struct request_queue *q)
{
	u64 pages = max_t(u64, queue_max_segments(q), 2) - 1;

	return min_t(u64, pages << PAGE_SHIFT, max_hw_bytes(q));
}

/*
 * While data is mapped, the operation says in which direction it goes: whether
 * pages are dirty afterwards, and when a bounce buffer is filled.
 */
static void begin_mapping(struct request *rq, bool is_write)
{
	rq->cmd_flags &= ~REQ_OP_MASK;
	rq->cmd_flags |= is_write ? REQ_OP_DRV_OUT : REQ_OP_DRV_IN;
}

static void end_mapping(struct request *rq)
{
	begin_mapping(rq, false);
}

/* Makes a request of data that is checked in all but number of segments. */
static struct request *map_request(const struct vbu_open *open,
				   unsigned int issue_flags,
				   struct iov_iter *iter)
{
	struct request *rq = alloc_request(open, issue_flags);
	int error;

	if (IS_ERR(rq))
		return rq;
	begin_mapping(rq, iov_iter_rw(iter) == WRITE);
	error = blk_rq_map_user_iov(rq->q, rq, NULL, iter, GFP_KERNEL);
	end_mapping(rq);
	if (error) {
		blk_mq_free_request(rq);
		return ERR_PTR(error == -EINVAL ? -E2BIG : error);
	}
	return rq;
}

static int check_data(const struct vbu_open *open, const struct vbu_cmd *cmd,
		      const struct iov_iter *iter)
{
	size_t bytes = iov_iter_count(iter);

	if (iov_iter_alignment(iter) & bdev_dma_alignment(vbu_bdev(open)) ||
	    bytes & (SECTOR_SIZE - 1))
		return -EINVAL;
	return check_range(open, cmd->sector, bytes >> SECTOR_SHIFT);
}

static int transfer(const struct vbu_open *open, struct io_uring_cmd *ioucmd,
		    unsigned int issue_flags, const struct vbu_cmd *cmd)
{
	int direction = cmd->type == VIRTIO_BLK_T_OUT ? ITER_SOURCE : ITER_DEST;
	u32 max_bytes = max_hw_bytes(bdev_get_queue(vbu_bdev(open)));
	struct iovec few[UIO_FASTIOV], *many = NULL;
	struct iov_iter iter;
	struct request *rq;
	int error;

	if (cmd->is_vec && cmd->is_fixed)
		return -EOPNOTSUPP;
	if (!cmd->len)
		return -EINVAL;
	if (cmd->len > (cmd->is_vec ? UIO_MAXIOV : max_bytes))
		return -E2BIG;
	if (cmd->is_vec) {
		if (cmd->len > ARRAY_SIZE(few)) {
			many = kmalloc_array(cmd->len, sizeof(*many),
					     GFP_KERNEL_ACCOUNT);
			if (!many)
				return -ENOMEM;
		}
		error = import_buffers(cmd, issue_flags, direction, max_bytes,
				       many ? many : few, &iter);
	} else if (cmd->is_fixed) {
		error = vbu_import_fixed(ioucmd, cmd->data, cmd->len, direction,
					 &iter, issue_flags);
	} else {
		error = import_ubuf(direction, u64_to_user_ptr(cmd->data),
				    cmd->len, &iter);
	}
	if (!error)
		error = check_data(open, cmd, &iter);
	if (error)
		goto free;
	rq = map_request(open, issue_flags, &iter);
	error = IS_ERR(rq) ? PTR_ERR(rq) :
		start(open, ioucmd, cmd, rq, rq->bio, NULL);
free:
	kfree(many);
	return error;
}

/* Takes the payload, also when it fails. */
static int submit_payload(const struct vbu_open *open,
			  struct io_uring_cmd *ioucmd,
			  unsigned int issue_flags, const struct vbu_cmd *cmd,
			  struct vbu_payload *payload, u32 len)
{
	struct request *rq = alloc_request(open, issue_flags);
	int error;

	if (IS_ERR(rq)) {
		error = PTR_ERR(rq);
		goto free;
	}
	begin_mapping(rq, !payload->user);
	error = vbu_map_kern(rq, payload->data, len);
	end_mapping(rq);
	if (error) {
		blk_mq_free_request(rq);
		goto free;
	}
	return start(open, ioucmd, cmd, rq, NULL, payload);

free:
	kfree(payload);
	return error;
}

static int get_id(const struct vbu_open *open, struct io_uring_cmd *ioucmd,
		  unsigned int issue_flags, const struct vbu_cmd *cmd)
{
	struct vbu_payload *payload;

	if (!cmd->len || cmd->sector)
		return -EINVAL;
	payload = kzalloc(sizeof(*payload) + VIRTIO_BLK_ID_BYTES,
			  GFP_KERNEL_ACCOUNT);
	if (!payload)
		return -ENOMEM;
	payload->user = u64_to_user_ptr(cmd->data);
	payload->user_len = min_t(u32, cmd->len, VIRTIO_BLK_ID_BYTES);
	return submit_payload(open, ioucmd, issue_flags, cmd, payload,
			      VIRTIO_BLK_ID_BYTES);
}

static int check_ranges(const struct vbu_open *open,
			const struct virtio_blk_discard_write_zeroes *ranges,
			u32 count, u32 max_sectors, u32 allowed_flags)
{
	u32 i;

	for (i = 0; i < count; i++) {
		u32 sectors = le32_to_cpu(ranges[i].num_sectors);
		int error = check_range(open, le64_to_cpu(ranges[i].sector),
					sectors);

		if (error)
			return error;
		if (le32_to_cpu(ranges[i].flags) & ~allowed_flags)
			return -EINVAL;
		if (sectors > max_sectors)
			return -E2BIG;
	}
	return 0;
}

static int clear_ranges(const struct vbu_open *open,
			struct io_uring_cmd *ioucmd, unsigned int issue_flags,
			const struct vbu_cmd *cmd)
{
	const struct vbu_limits *limits = &open->node->limits;
	bool is_discard = cmd->type == VIRTIO_BLK_T_DISCARD;
	u32 max_sectors = is_discard ? limits->max_discard_sectors :
				       limits->max_write_zeroes_sectors;
	u32 max_ranges = is_discard ? limits->max_discard_ranges :
				      limits->max_write_zeroes_ranges;
	struct vbu_payload *payload;
	int error;

	if (!max_sectors)
		return -EOPNOTSUPP;
	if (!cmd->len || cmd->len % RANGE_BYTES || cmd->sector)
		return -EINVAL;
	if (cmd->len / RANGE_BYTES > max_ranges)
		return -E2BIG;
	payload = kzalloc(sizeof(*payload) + cmd->len, GFP_KERNEL_ACCOUNT);
	if (!payload)
		return -ENOMEM;
	/* A copy: what is checked is what the device gets. */
	error = -EFAULT;
	if (!copy_from_user(payload->data, u64_to_user_ptr(cmd->data),
			    cmd->len))
		error = check_ranges(open, (void *)payload->data,
				     cmd->len / RANGE_BYTES, max_sectors,
				     is_discard ? 0 :
				     VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP);
	if (error) {
		kfree(payload);
		return error;
	}
	return submit_payload(open, ioucmd, issue_flags, cmd, payload,
			      cmd->len);
}

static int flush(const struct vbu_open *open, struct io_uring_cmd *ioucmd,
		 unsigned int issue_flags, const struct vbu_cmd *cmd)
{
	struct request *rq;

	if (cmd->sector || cmd->data || cmd->len)
		return -EINVAL;
	if (!(open->node->limits.features & BIT_ULL(VIRTIO_BLK_F_FLUSH)))
		return 0;
	rq = alloc_request(open, issue_flags);
	if (IS_ERR(rq))
		return PTR_ERR(rq);
	return start(open, ioucmd, cmd, rq, NULL, NULL);
}

int vbu_uring_cmd(struct io_uring_cmd *ioucmd, unsigned int issue_flags)
{
	const struct vbu_open *open = ioucmd->file->private_data;
	struct vbu_cmd cmd;
	int error;

	error = read_command(ioucmd, issue_flags, &cmd);
	if (error)
		return error;
	if (READ_ONCE(open->node->is_gone))
		return -ENODEV;
	error = check_access(open, ioucmd->file, cmd.type);
	if (error)
		return error;
	error = check_priority(cmd.ioprio);
	if (error)
		return error;
	if (cmd.type == VIRTIO_BLK_T_IN || cmd.type == VIRTIO_BLK_T_OUT)
		return transfer(open, ioucmd, issue_flags, &cmd);
	switch (cmd.type) {
	case VIRTIO_BLK_T_FLUSH:
	case VIRTIO_BLK_T_GET_ID:
	case VIRTIO_BLK_T_DISCARD:
	case VIRTIO_BLK_T_WRITE_ZEROES:
		if (cmd.is_vec || cmd.is_fixed)
			return -EINVAL;
		break;
	default:
		return -EOPNOTSUPP;
	}
	if (cmd.type == VIRTIO_BLK_T_FLUSH)
		return flush(open, ioucmd, issue_flags, &cmd);
	if (cmd.type == VIRTIO_BLK_T_GET_ID)
		return get_id(open, ioucmd, issue_flags, &cmd);
	return clear_ranges(open, ioucmd, issue_flags, &cmd);
}

/*
 * The request may end, and be another command's, at any time: its memory is the
 * queue's, which the reference keeps until the poll is over.
 */
int vbu_uring_cmd_iopoll(struct io_uring_cmd *ioucmd,
			 struct io_comp_batch *batch, unsigned int poll_flags)
{
	const struct vbu_open *open = ioucmd->file->private_data;
	struct request_queue *q = bdev_get_queue(vbu_bdev(open));
	struct request *rq;
	int found = 0;

	if (!percpu_ref_tryget(&q->q_usage_counter))
		return 0;
	rq = READ_ONCE(pdu_of(ioucmd)->rq);
	if (rq)
		found = blk_rq_poll(rq, batch, poll_flags);
	percpu_ref_put(&q->q_usage_counter);
	return found;
}

int vbu_get_serial(struct vbu_open *open, u8 serial[VIRTBLK_SERIAL_BYTES])
{
	u8 *id = kzalloc(VIRTIO_BLK_ID_BYTES, GFP_KERNEL_ACCOUNT);
	struct request *rq;
	int error;

	if (!id)
		return -ENOMEM;
	rq = alloc_request(open, 0);
	if (IS_ERR(rq)) {
		error = PTR_ERR(rq);
		goto free;
	}
	error = vbu_map_kern(rq, id, VIRTIO_BLK_ID_BYTES);
	if (!error) {
		set_header(open, rq, VIRTIO_BLK_T_GET_ID, 0, 0);
		error = result_of(rq, blk_execute_rq(rq, false));
	}
	if (!error)
		memcpy(serial, id, VIRTBLK_SERIAL_BYTES);
	blk_mq_free_request(rq);
free:
	kfree(id);
	return error;
}

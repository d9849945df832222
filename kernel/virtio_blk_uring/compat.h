/* SPDX-License-Identifier: GPL-2.0-only */
/* The calls that differ between Linux 6.12 and 7.3. */
#ifndef VBU_COMPAT_H
#define VBU_COMPAT_H

#include <linux/blk-mq.h>
#include <linux/io_uring/cmd.h>
#include <linux/version.h>

/* Ends a command in the task that has submitted it. */
static void vbu_complete(struct io_uring_cmd *ioucmd, unsigned int issue_flags);

#if LINUX_VERSION_CODE < KERNEL_VERSION(7, 3, 0)

#define VBU_END_IO_ARGS	struct request *rq, blk_status_t error

static inline const void *vbu_payload_of(const struct io_uring_sqe *sqe)
{
	return io_uring_sqe_cmd(sqe);
}

static inline int vbu_import_fixed(struct io_uring_cmd *ioucmd, u64 data,
				   u32 len, int direction,
				   struct iov_iter *iter,
				   unsigned int issue_flags)
{
	return io_uring_cmd_import_fixed(data, len, direction, iter, ioucmd);
}

static inline int vbu_map_kern(struct request *rq, void *data, u32 len)
{
	return blk_rq_map_kern(rq->q, rq, data, len, GFP_KERNEL);
}

static inline void vbu_done(struct io_uring_cmd *ioucmd, int result,
			    unsigned int issue_flags)
{
	io_uring_cmd_done(ioucmd, result, 0, issue_flags);
}

static inline void vbu_complete_in_task(struct io_uring_cmd *ioucmd)
{
	io_uring_cmd_do_in_task_lazy(ioucmd, vbu_complete);
}

#else

#define VBU_END_IO_ARGS	struct request *rq, blk_status_t error, \
			const struct io_comp_batch *batch

static inline const void *vbu_payload_of(const struct io_uring_sqe *sqe)
{
	return sqe->cmd;
}

static inline int vbu_import_fixed(struct io_uring_cmd *ioucmd, u64 data,
				   u32 len, int direction,
				   struct iov_iter *iter,
				   unsigned int issue_flags)
{
	return io_uring_cmd_import_fixed(data, len, direction, iter, ioucmd,
					 issue_flags);
}

static inline int vbu_map_kern(struct request *rq, void *data, u32 len)
{
	return blk_rq_map_kern(rq, data, len, GFP_KERNEL);
}

static inline void vbu_done(struct io_uring_cmd *ioucmd, int result,
			    unsigned int issue_flags)
{
	io_uring_cmd_done(ioucmd, result, issue_flags);
}

static void vbu_complete_work(struct io_tw_req tw_req, io_tw_token_t tw)
{
	vbu_complete(io_uring_cmd_from_tw(tw_req),
		     IO_URING_CMD_TASK_WORK_ISSUE_FLAGS);
}

static inline void vbu_complete_in_task(struct io_uring_cmd *ioucmd)
{
	io_uring_cmd_do_in_task_lazy(ioucmd, vbu_complete_work);
}

#endif
#endif

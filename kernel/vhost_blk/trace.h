/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Tracepoints of vhost_blk: events/vhost_blk in tracefs.
 */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM vhost_blk

#if !defined(_VHOST_BLK_TRACE_H) || defined(TRACE_HEADER_MULTI_READ)
#define _VHOST_BLK_TRACE_H

#include <linux/kdev_t.h>
#include <linux/tracepoint.h>

#include "vhost_blk.h"

#define show_vhost_blk_type(type)				\
	__print_symbolic(type,					\
			 { VIRTIO_BLK_T_IN, "IN" },		\
			 { VIRTIO_BLK_T_OUT, "OUT" },		\
			 { VIRTIO_BLK_T_FLUSH, "FLUSH" },	\
			 { VIRTIO_BLK_T_GET_ID, "GET_ID" },	\
			 { VIRTIO_BLK_T_DISCARD, "DISCARD" },	\
			 { VIRTIO_BLK_T_WRITE_ZEROES, "WRITE_ZEROES" })

/* A request was taken from its ring, and its header read. */
TRACE_EVENT(vhost_blk_submit,
	    TP_PROTO(const struct vhost_blk_req *req),
	    TP_ARGS(req),
	    TP_STRUCT__entry(__field(dev_t, disk)
			     __field(u32, queue)
			     __field(u32, type)
			     __field(u64, sector)
			     __field(u64, bytes)
			     __field(u16, head)
	    ),
	    TP_fast_assign(__entry->disk = vhost_blk_disk(req->queue->blk)->bd_dev;
			   __entry->queue = vhost_blk_queue_index(req->queue);
			   __entry->type = req->type;
			   __entry->sector = req->sector;
			   __entry->bytes = req->bytes;
			   __entry->head = req->head;
	    ),
	    TP_printk("disk=%d:%d queue=%u head=%u type=%s sector=%llu bytes=%llu",
		      MAJOR(__entry->disk), MINOR(__entry->disk),
		      __entry->queue, __entry->head,
		      show_vhost_blk_type(__entry->type), __entry->sector,
		      __entry->bytes)
);

/* A request has ended, and is published next. */
TRACE_EVENT(vhost_blk_complete,
	    TP_PROTO(const struct vhost_blk_req *req, int error, u32 used,
		     u64 latency_ns),
	    TP_ARGS(req, error, used, latency_ns),
	    TP_STRUCT__entry(__field(dev_t, disk)
			     __field(u32, queue)
			     __field(u32, type)
			     __field(u64, sector)
			     __field(u64, bytes)
			     __field(u64, latency_ns)
			     __field(u32, used)
			     __field(int, error)
			     __field(u16, head)
	    ),
	    TP_fast_assign(__entry->disk = vhost_blk_disk(req->queue->blk)->bd_dev;
			   __entry->queue = vhost_blk_queue_index(req->queue);
			   __entry->type = req->type;
			   __entry->sector = req->sector;
			   __entry->bytes = req->bytes;
			   __entry->latency_ns = latency_ns;
			   __entry->used = used;
			   __entry->error = error;
			   __entry->head = req->head;
	    ),
	    TP_printk("disk=%d:%d queue=%u head=%u type=%s sector=%llu bytes=%llu error=%d used=%u latency_ns=%llu",
		      MAJOR(__entry->disk), MINOR(__entry->disk),
		      __entry->queue, __entry->head,
		      show_vhost_blk_type(__entry->type), __entry->sector,
		      __entry->bytes, __entry->error, __entry->used,
		      __entry->latency_ns)
);

#endif

/* This part must be outside the protection. */
#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH .
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE trace
#include <trace/define_trace.h>

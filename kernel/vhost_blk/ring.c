// SPDX-License-Identifier: GPL-2.0-only
/*
 * A ring: takes requests when the guest kicks, publishes them as used when
 * their bios have ended.
 *
 * Requests are completed by the ring's worker. A worker that is a task of the
 * owner dies with the owner's SIGKILL; a work queue then completes what is in
 * flight, in the owner's memory, which lives until the device is closed.
 */
#include <linux/kthread.h>
#include <linux/ktime.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "vhost_blk.h"
#include "trace.h"

/* A busy poll holds the ring's mutex: longer requests are cut to this. */
#define MAX_BUSY_POLL_US	1000U

static u8 status_of(int error)
{
	switch (error) {
	case 0:
		return VIRTIO_BLK_S_OK;
	case -EOPNOTSUPP:
		return VIRTIO_BLK_S_UNSUPP;
	default:
		return VIRTIO_BLK_S_IOERR;
	}
}

/* The request's head is the guest's again. */
static void publish(struct vhost_blk_req *req)
{
	vhost_add_used(&req->queue->vq, req->head, req->used);
	req->busy = false;
}

/* Accounts for a request that has ended. */
static void end_req(struct vhost_blk_req *req, int error, u32 used)
{
	struct vhost_blk_queue *queue = req->queue;
	struct vhost_virtqueue *vq = &queue->vq;
	struct vhost_blk_stats *stats = &queue->stats;
	unsigned int i;
	u64 logged = 0;

	vhost_blk_mark_changes(req);
	kfree(req->ranges);
	req->ranges = NULL;
	if (error)
		stats->errors++;
	else if (req->is_read)
		stats->read_bytes += req->data_bytes;
	else
		stats->written_bytes += req->data_bytes;
	req->used = used;
	if (req->log) {
		for (i = 0; i < req->log_num; i++)
			logged += req->log[i].len;
		vhost_log_write(vq, req->log, req->log_num, logged, NULL, 0);
		kfree(req->log);
		req->log = NULL;
	}
	if (trace_vhost_blk_complete_enabled())
		trace_vhost_blk_complete(req, error, used, req->started ?
					 ktime_get_ns() - req->started : 0);
}

/* The kernel has no more to do for a request, but to publish it. */
static void leave_flight(struct vhost_blk_queue *queue)
{
	if (atomic_dec_and_test(&queue->inflight))
		wake_up_all(&queue->blk->drained);
}

static void publish_or_hold(struct vhost_blk_req *req)
{
	struct vhost_blk_queue *queue = req->queue;

	if (vhost_blk_is_held_back(req)) {
		list_add_tail(&req->node, &queue->held);
		queue->unpublished++;
	} else {
		publish(req);
	}
	leave_flight(queue);
}

/* Ends a request that the kernel has served. */
static void finish_req(struct vhost_blk_req *req)
{
	int error = vhost_blk_release_data(req);
	u32 used = 1;

	error = req->error ?: error;
	if (!error && req->is_read)
		used += req->data_bytes;
	if (put_user(status_of(error), req->status))
		vq_err(&req->queue->vq, "head %u: its status cannot be written\n",
		       req->head);
	end_req(req, error, used);
	publish_or_hold(req);
}

/**
 * vhost_blk_complete_punted - end a request that the user has served
 * @req: the request, with the ring's mutex held
 * @used: bytes that the user has written, the status included
 */
void vhost_blk_complete_punted(struct vhost_blk_req *req, u32 used)
{
	struct vhost_blk_queue *queue = req->queue;
	struct vhost_blk_req *next;
	u8 status;

	/* The user has written it: this is for the counters. */
	if (get_user(status, req->status))
		status = VIRTIO_BLK_S_IOERR;
	end_req(req, status == VIRTIO_BLK_S_OK ? 0 :
		     status == VIRTIO_BLK_S_UNSUPP ? -EOPNOTSUPP : -EIO, used);
	req->is_given = false;
	list_move_tail(&req->node, &queue->held);
	list_for_each_entry_safe(req, next, &queue->held, node) {
		if (vhost_blk_is_held_back(req))
			continue;
		list_del(&req->node);
		queue->unpublished--;
		publish(req);
	}
	vhost_signal(&queue->blk->dev, &queue->vq);
}

/* Completes all requests that have ended: one signal for all of them. */
static void complete_done(struct vhost_blk_queue *queue)
{
	struct llist_node *list = llist_del_all(&queue->done_list);
	struct vhost_blk_req *req, *next;
	unsigned int count = 0;

	if (!list)
		return;
	mutex_lock(&queue->vq.mutex);
	llist_for_each_entry_safe(req, next, llist_reverse_order(list), done) {
		if (req->flush_after && !req->error) {
			req->flush_after = false;
			vhost_blk_submit_flush(req);
			continue;
		}
		finish_req(req);
		count++;
	}
	if (count) {
		queue->stats.batches[min_t(unsigned int, ilog2(count),
					   VHOST_BLK_BATCH_BUCKETS - 1)]++;
		vhost_signal(&queue->blk->dev, &queue->vq);
	}
	if (queue->is_full && queue->memory < VHOST_BLK_MAX_MEMORY) {
		queue->is_full = false;
		vhost_poll_queue(&queue->vq.poll);
	}
	mutex_unlock(&queue->vq.mutex);
}

static void done_work(struct vhost_work *work)
{
	complete_done(container_of(work, struct vhost_blk_queue, done_work));
}

static void fallback_work(struct work_struct *work)
{
	struct vhost_blk_queue *queue =
		container_of(work, struct vhost_blk_queue, fallback);
	struct mm_struct *mm = queue->blk->dev.mm;

	kthread_use_mm(mm);
	complete_done(queue);
	kthread_unuse_mm(mm);
}

/**
 * vhost_blk_put_req - a bio of the request has ended
 * @req: the request
 *
 * The last one hands the request to the ring's worker, or to the work queue
 * when there is no worker. Context: any, interrupts too.
 */
void vhost_blk_put_req(struct vhost_blk_req *req)
{
	struct vhost_blk_queue *queue = req->queue;

	if (!atomic_dec_and_test(&req->pending))
		return;
	/* Once in the list, only wait_until_drained() keeps the queue. */
	rcu_read_lock();
	llist_add(&req->done, &queue->done_list);
	if (!vhost_vq_work_queue(&queue->vq, &queue->done_work))
		queue_work(vhost_blk_wq, &queue->fallback);
	rcu_read_unlock();
}

/* Takes a descriptor chain; false: the ring is invalid. */
static bool serve(struct vhost_blk_queue *queue, unsigned int head,
		  unsigned int out, unsigned int in, unsigned int log_num)
{
	struct vhost_virtqueue *vq = &queue->vq;
	struct vhost_blk_req *req = &queue->reqs[head];
	struct iovec *last;
	int error;

	if (req->busy) {
		vq_err(vq, "head %u is in flight and available\n", head);
		return false;
	}
	req->queue = queue;
	req->number = queue->taken++;
	req->started = trace_vhost_blk_complete_enabled() ? ktime_get_ns() : 0;
	req->sector = 0;
	req->bytes = 0;
	req->type = U32_MAX;
	req->head = head;
	req->busy = true;
	req->bounced = false;
	req->is_read = false;
	req->flush_after = false;
	req->is_change = false;
	req->nr_ranges = 0;
	req->memory = 0;
	req->error = 0;
	req->data_bytes = 0;
	req->is_given = false;
	req->writable = iov_length(vq->iov + out, in);
	atomic_inc(&queue->inflight);
	if (!req->writable) {
		/* Malformed: there is no byte for a status. */
		queue->stats.others++;
		queue->stats.errors++;
		req->used = 0;
		publish_or_hold(req);
		return true;
	}
	last = &vq->iov[out + in - 1];
	req->status = (u8 __user *)last->iov_base + last->iov_len - 1;
	req->pages = req->inline_pages;
	/* Memory that is written and not logged is lost by a migration. */
	if (log_num)
		req->log = kmemdup(vq->log, log_num * sizeof(*vq->log),
				   GFP_KERNEL | __GFP_NOFAIL);
	req->log_num = log_num;
	error = vhost_blk_submit(req, out, in);
	if (error == VHOST_BLK_PUNTED) {
		vhost_blk_punt(req);
		leave_flight(queue);
	} else if (error != -EINPROGRESS) {
		req->error = error;
		finish_req(req);
	}
	return true;
}

/* Looks for more requests instead of sleeping; true when there are some. */
static bool busy_poll(struct vhost_virtqueue *vq)
{
	ktime_t end;

	if (!vq->busyloop_timeout)
		return false;
	end = ktime_add_us(ktime_get(),
			   min(vq->busyloop_timeout, MAX_BUSY_POLL_US));
	while (!need_resched() && !signal_pending(current) &&
	       !vhost_vq_has_work(vq) && ktime_before(ktime_get(), end)) {
		if (!vhost_vq_avail_empty(vq->dev, vq))
			return true;
		cpu_relax();
	}
	return false;
}

static void take_requests(struct vhost_blk_queue *queue)
{
	struct vhost_virtqueue *vq = &queue->vq;
	struct vhost_log *log = vhost_has_feature(vq, VHOST_F_LOG_ALL) ?
				vq->log : NULL;
	unsigned int out, in, log_num = 0;
	int head, taken = 0;

	vhost_disable_notify(vq->dev, vq);
	do {
		/* complete_done() lets the ring take more. */
		if (queue->memory >= VHOST_BLK_MAX_MEMORY) {
			queue->is_full = true;
			return;
		}
		head = vhost_get_vq_desc(vq, vq->iov, ARRAY_SIZE(vq->iov), &out,
					 &in, log, &log_num);
		if (head == vq->num) {
			if (busy_poll(vq))
				continue;
			if (!vhost_enable_notify(vq->dev, vq))
				return;
			vhost_disable_notify(vq->dev, vq);
			continue;
		}
		if (head < 0 || !serve(queue, head, out, in, log_num)) {
			queue->is_broken = true;
			if (head < 0)
				vq_err(vq, "invalid descriptor: %d\n", head);
			return;
		}
	} while (!vhost_exceeds_weight(vq, ++taken, 0));
}

static void handle_kick(struct vhost_work *work)
{
	struct vhost_virtqueue *vq =
		container_of(work, struct vhost_virtqueue, poll.work);
	struct vhost_blk_queue *queue = vhost_blk_queue_of(vq);
	struct blk_plug plug;
	u16 used;

	mutex_lock(&vq->mutex);
	queue->stats.kicks++;
	if (vhost_vq_get_backend(vq) && !queue->is_broken) {
		used = vq->last_used_idx;
		blk_start_plug(&plug);
		take_requests(queue);
		blk_finish_plug(&plug);
		if (used != vq->last_used_idx)
			vhost_signal(vq->dev, vq);
	}
	mutex_unlock(&vq->mutex);
}

void vhost_blk_init_queue(struct vhost_blk *blk, struct vhost_blk_queue *queue)
{
	queue->blk = blk;
	queue->vq.handle_kick = handle_kick;
	vhost_work_init(&queue->done_work, done_work);
	INIT_WORK(&queue->fallback, fallback_work);
	init_llist_head(&queue->done_list);
	atomic_set(&queue->inflight, 0);
	INIT_LIST_HEAD(&queue->punted);
	INIT_LIST_HEAD(&queue->given);
	INIT_LIST_HEAD(&queue->held);
}

/**
 * vhost_blk_start_queue - let a ring run
 * @queue: the ring, which does not run
 *
 * Context: the device's mutex is held, and the disk attached.
 * Return: 0, -EINVAL for a ring without valid addresses, -ENOMEM, -EFAULT.
 */
int vhost_blk_start_queue(struct vhost_blk_queue *queue)
{
	struct vhost_virtqueue *vq = &queue->vq;
	struct vhost_blk_req *reqs;
	int error = -EINVAL;

	reqs = kvcalloc(vq->num, sizeof(*reqs), GFP_KERNEL_ACCOUNT);
	if (!reqs)
		return -ENOMEM;
	mutex_lock(&vq->mutex);
	if (!vhost_vq_is_setup(vq))
		goto free;
	vhost_vq_set_backend(vq, queue->blk);
	error = vhost_vq_init_access(vq);
	if (error) {
		vhost_vq_set_backend(vq, NULL);
		goto free;
	}
	queue->reqs = reqs;
	queue->nr_reqs = vq->num;
	queue->taken = 0;
	queue->is_broken = false;
	queue->is_full = false;
	mutex_unlock(&vq->mutex);
	/* A kick may have come, and been lost, before. */
	vhost_poll_queue(&vq->poll);
	return 0;

free:
	mutex_unlock(&vq->mutex);
	kvfree(reqs);
	return error;
}

/*
 * Waits until all requests of a queue without a backend have ended or are with
 * the user, and all that could touch the queue has ended.
 */
static void wait_until_drained(struct vhost_blk_queue *queue)
{
	vhost_dev_flush(&queue->blk->dev);
	wait_event(queue->blk->drained, !atomic_read(&queue->inflight));
	synchronize_rcu();
	flush_work(&queue->fallback);
	vhost_dev_flush(&queue->blk->dev);
}

/**
 * vhost_blk_pause_queue - take no more requests, and wait for all others
 * @queue: a ring that runs
 *
 * Context: the device's mutex is held.
 */
void vhost_blk_pause_queue(struct vhost_blk_queue *queue)
{
	mutex_lock(&queue->vq.mutex);
	vhost_vq_set_backend(&queue->vq, NULL);
	mutex_unlock(&queue->vq.mutex);
	wait_until_drained(queue);
}

/**
 * vhost_blk_resume_queue - let a ring run that was paused
 * @queue: the ring
 */
void vhost_blk_resume_queue(struct vhost_blk_queue *queue)
{
	mutex_lock(&queue->vq.mutex);
	vhost_vq_set_backend(&queue->vq, queue->blk);
	mutex_unlock(&queue->vq.mutex);
	vhost_poll_queue(&queue->vq.poll);
}

/**
 * vhost_blk_stop_queue - end a ring's run
 * @queue: a ring; nothing happens when it does not run
 */
void vhost_blk_stop_queue(struct vhost_blk_queue *queue)
{
	struct vhost_blk_req *reqs;

	if (!queue->reqs)
		return;
	vhost_blk_pause_queue(queue);
	mutex_lock(&queue->vq.mutex);
	vhost_blk_abandon(queue);
	reqs = queue->reqs;
	queue->reqs = NULL;
	queue->nr_reqs = 0;
	mutex_unlock(&queue->vq.mutex);
	kvfree(reqs);
}

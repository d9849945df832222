// SPDX-License-Identifier: GPL-2.0-only
/*
 * Punted requests: the user reads their heads from the device, serves them in
 * the guest's memory, and writes back that they are complete.
 *
 * While a punted request is not complete, no request that was taken behind it
 * is published. What is published is therefore always a beginning of what was
 * taken, and a successor that begins at the index of the used ring repeats
 * the others, and loses none.
 *
 * Requests that are with the user, or held back, are not in flight for a
 * drain: nothing of the kernel waits for the user.
 */
#include <linux/nospec.h>
#include <linux/poll.h>

#include "vhost_blk.h"

static struct vhost_blk_req *oldest_punted(struct vhost_blk_queue *queue)
{
	struct vhost_blk_req *req;

	req = list_first_entry_or_null(&queue->given, struct vhost_blk_req,
				       node);
	return req ?: list_first_entry_or_null(&queue->punted,
					       struct vhost_blk_req, node);
}

/**
 * vhost_blk_is_held_back - whether a request must not be published yet
 * @req: a request that has ended, with the ring's mutex held
 */
bool vhost_blk_is_held_back(const struct vhost_blk_req *req)
{
	const struct vhost_blk_req *oldest = oldest_punted(req->queue);

	return oldest && (s32)(req->number - oldest->number) > 0;
}

/**
 * vhost_blk_punt - hand a request to the user
 * @req: the request, with the ring's mutex held
 */
void vhost_blk_punt(struct vhost_blk_req *req)
{
	struct vhost_blk_queue *queue = req->queue;

	list_add_tail(&req->node, &queue->punted);
	queue->unpublished++;
	atomic_inc(&queue->blk->nr_punted);
	wake_up_interruptible(&queue->blk->has_punted);
}

/**
 * vhost_blk_abandon - give back what is not published
 * @queue: a ring that is drained, with the mutex held
 *
 * The ring's base goes back to the oldest of these requests: its next run
 * takes them again.
 */
void vhost_blk_abandon(struct vhost_blk_queue *queue)
{
	struct vhost_blk_req *req;
	unsigned int i;

	list_for_each_entry(req, &queue->punted, node)
		atomic_dec(&queue->blk->nr_punted);
	queue->vq.last_avail_idx -= queue->unpublished;
	queue->unpublished = 0;
	INIT_LIST_HEAD(&queue->punted);
	INIT_LIST_HEAD(&queue->given);
	INIT_LIST_HEAD(&queue->held);
	for (i = 0; i < queue->nr_reqs; i++) {
		kfree(queue->reqs[i].ranges);
		kfree(queue->reqs[i].log);
	}
}

/* Only the owner's memory has what the heads stand for. */
static bool is_owner(const struct vhost_blk *blk)
{
	return current->mm && READ_ONCE(blk->dev.mm) == current->mm;
}

/* Copies heads of a ring to the user; moves those to the list of the given. */
static ssize_t give(struct vhost_blk_queue *queue, char __user *buffer,
		    size_t room)
{
	struct vhost_blk_punted entry = {
		.queue = vhost_blk_queue_index(queue),
	};
	struct vhost_blk_req *req, *next;
	ssize_t copied = 0;

	mutex_lock(&queue->vq.mutex);
	list_for_each_entry_safe(req, next, &queue->punted, node) {
		if (room - copied < sizeof(entry))
			break;
		entry.head = req->head;
		if (copy_to_user(buffer + copied, &entry, sizeof(entry))) {
			copied = copied ?: -EFAULT;
			break;
		}
		copied += sizeof(entry);
		list_move_tail(&req->node, &queue->given);
		req->is_given = true;
		atomic_dec(&queue->blk->nr_punted);
	}
	mutex_unlock(&queue->vq.mutex);
	return copied;
}

ssize_t vhost_blk_read(struct file *file, char __user *buffer, size_t size,
		       loff_t *pos)
{
	struct vhost_blk *blk = file->private_data;
	ssize_t copied = 0, more;
	unsigned int i;
	int error;

	if (!is_owner(blk))
		return -EPERM;
	if (size < sizeof(struct vhost_blk_punted))
		return -EINVAL;
	size = min_t(size_t, size, MAX_RW_COUNT);
	for (;;) {
		for (i = 0; i < blk->nr_queues; i++) {
			more = give(&blk->queues[i], buffer + copied,
				    size - copied);
			if (more < 0)
				return copied ?: more;
			copied += more;
		}
		if (copied)
			return copied;
		if (file->f_flags & O_NONBLOCK)
			return -EAGAIN;
		error = wait_event_interruptible(blk->has_punted,
						 atomic_read(&blk->nr_punted));
		if (error)
			return error;
	}
}

/* Ends a request that the user has served. */
static int end_punted(struct vhost_blk *blk,
		      const struct vhost_blk_completion *entry)
{
	struct vhost_blk_queue *queue = vhost_blk_find_queue(blk, entry->queue);
	struct vhost_blk_req *req;
	int error = -EINVAL;

	if (!queue)
		return error;
	mutex_lock(&queue->vq.mutex);
	/* There are no requests while the ring is stopped. */
	if (entry->head < queue->nr_reqs) {
		req = &queue->reqs[array_index_nospec(entry->head,
						      queue->nr_reqs)];
		if (req->is_given && entry->length <= req->writable) {
			vhost_blk_complete_punted(req, entry->length);
			error = 0;
		}
	}
	mutex_unlock(&queue->vq.mutex);
	return error;
}

ssize_t vhost_blk_write(struct file *file, const char __user *buffer,
			size_t size, loff_t *pos)
{
	struct vhost_blk *blk = file->private_data;
	struct vhost_blk_completion entry;
	size_t done;
	int error;

	if (!is_owner(blk))
		return -EPERM;
	size = min_t(size_t, size, MAX_RW_COUNT);
	if (size < sizeof(entry))
		return -EINVAL;
	for (done = 0; size - done >= sizeof(entry); done += sizeof(entry)) {
		error = copy_from_user(&entry, buffer + done, sizeof(entry)) ?
			-EFAULT : end_punted(blk, &entry);
		if (error)
			return done ?: error;
	}
	return done;
}

__poll_t vhost_blk_poll(struct file *file, poll_table *wait)
{
	struct vhost_blk *blk = file->private_data;

	poll_wait(file, &blk->has_punted, wait);
	return EPOLLOUT | EPOLLWRNORM |
	       (atomic_read(&blk->nr_punted) ? EPOLLIN | EPOLLRDNORM : 0);
}

// uring-read: nanoseconds of one random read of 4 KiB by io_uring, by the way that it takes to a virtio-blk disk.
//
//   uring-read WAY BATCH SAMPLES PATH
//
// WAY: read, read-fixed, pass, pass-fixed, compact, or one of these with -polled (PATH is then opened for polling).
// PATH: /dev/vdX with read (with O_DIRECT unless WAY begins with buffered-), /dev/vdXc0 else.
//
// It is meant for an emulated processor whose clock counts instructions, so that a nanosecond is an instruction. A
// sample is a submission of BATCH reads, a spin until all are complete, less what the spin itself has cost: so all
// work of the kernel is in it, interrupts included, and none of the time of the device. A polled ring gets no
// interrupts: the spin is long enough for the device, and the sample is the submission and the one call that reaps.
// Prints the median, the first and the ninth decile of a read.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "../../kernel/include/uapi/linux/virtio_blk_uring.h"

enum { BLOCK = 4096, MOST = 64, DEVICE_SPINS = 300000, DISK_BLOCKS = 1 << 18 };

static struct {
	int fd, is_wide;
	_Atomic unsigned *sq_tail, *cq_tail, *cq_head;
	unsigned sq_mask, cq_mask;
	char *sqes;
	struct io_uring_cqe *cqes;
} ring;

static void fail(const char *what)
{
	fprintf(stderr, "uring-read: %s: %s\n", what, strerror(errno));
	exit(1);
}

static uint64_t now(void)
{
	struct timespec at;

	clock_gettime(CLOCK_MONOTONIC, &at);
	return at.tv_sec * 1000000000ull + at.tv_nsec;
}

static void make_ring(unsigned flags)
{
	struct io_uring_params params = { .flags = flags };
	char *sq, *cq;

	ring.fd = syscall(__NR_io_uring_setup, MOST, &params);
	if (ring.fd < 0)
		fail("io_uring_setup");
	ring.is_wide = !!(flags & IORING_SETUP_SQE128);
	sq = mmap(NULL, params.sq_off.array + MOST * 4, PROT_READ | PROT_WRITE, MAP_SHARED, ring.fd, IORING_OFF_SQ_RING);
	cq = mmap(NULL, params.cq_off.cqes + 2 * MOST * sizeof(*ring.cqes), PROT_READ | PROT_WRITE, MAP_SHARED, ring.fd,
		  IORING_OFF_CQ_RING);
	ring.sqes = mmap(NULL, MOST * 128, PROT_READ | PROT_WRITE, MAP_SHARED, ring.fd, IORING_OFF_SQES);
	if (ring.sqes == MAP_FAILED)
		ring.sqes = mmap(NULL, MOST * 64, PROT_READ | PROT_WRITE, MAP_SHARED, ring.fd, IORING_OFF_SQES);
	if (sq == MAP_FAILED || cq == MAP_FAILED || ring.sqes == MAP_FAILED)
		fail("mmap");
	ring.sq_tail = (void *)(sq + params.sq_off.tail);
	ring.sq_mask = *(unsigned *)(sq + params.sq_off.ring_mask);
	for (unsigned i = 0; i < MOST; i++)
		((unsigned *)(sq + params.sq_off.array))[i] = i;
	ring.cq_head = (void *)(cq + params.cq_off.head);
	ring.cq_tail = (void *)(cq + params.cq_off.tail);
	ring.cq_mask = *(unsigned *)(cq + params.cq_off.ring_mask);
	ring.cqes = (void *)(cq + params.cq_off.cqes);
}

static void offer(const char *way, int fd, unsigned tail, void *buffer, uint64_t block)
{
	struct io_uring_sqe *sqe = (void *)(ring.sqes + (tail & ring.sq_mask) * (ring.is_wide ? 128 : 64));
	int is_fixed = strstr(way, "fixed") != NULL;

	memset(sqe, 0, ring.is_wide ? 128 : 64);
	sqe->fd = fd;
	if (strstr(way, "read")) {
		sqe->opcode = is_fixed ? IORING_OP_READ_FIXED : IORING_OP_READ;
		sqe->addr = (uintptr_t)buffer;
		sqe->len = BLOCK;
		sqe->off = block * BLOCK;
		return;
	}
	sqe->opcode = IORING_OP_URING_CMD;
	sqe->uring_cmd_flags = is_fixed ? IORING_URING_CMD_FIXED : 0;
	if (strstr(way, "compact")) {
		struct virtblk_uring_compact *cmd = (void *)((char *)sqe + 48);

		sqe->cmd_op = VIRTBLK_URING_CMD_COMPACT;
		sqe->addr = (uintptr_t)buffer;
		sqe->len = BLOCK;
		cmd->sector = block * (BLOCK / 512);
	} else {
		struct virtblk_uring_cmd *cmd = (void *)((char *)sqe + 48);

		sqe->cmd_op = VIRTBLK_URING_CMD_IO;
		cmd->sector = block * (BLOCK / 512);
		cmd->data = (uintptr_t)buffer;
		cmd->data_len = BLOCK;
	}
}

static void enter(unsigned submit, unsigned wait, unsigned flags)
{
	if (syscall(__NR_io_uring_enter, ring.fd, submit, wait, flags, NULL, 0) < 0)
		fail("io_uring_enter");
}

static uint64_t spin(unsigned until, uint64_t most)
{
	uint64_t spins = 0;

	while (atomic_load_explicit(ring.cq_tail, memory_order_acquire) != until && spins < most)
		spins++;
	return spins;
}

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
	if (argc != 5)
		return 2;
	const char *way = argv[1];
	unsigned batch = atoi(argv[2]), samples = atoi(argv[3]);
	int is_polled = strstr(way, "polled") != NULL, is_read = strstr(way, "read") != NULL;
	int fd = open(argv[4], O_RDONLY | (is_read && !strstr(way, "buffered") ? O_DIRECT : 0));
	double *cost = calloc(samples, sizeof(*cost));
	char *memory = aligned_alloc(BLOCK, MOST * BLOCK);
	struct iovec registered = { memory, MOST * BLOCK };
	uint64_t random = 88172645463325252ull, begin, spins;
	double a_spin = 1e9;

	if (fd < 0)
		fail(argv[4]);
	posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
	memset(memory, 1, MOST * BLOCK);
	make_ring((is_polled ? IORING_SETUP_IOPOLL : 0) | (strstr(way, "pass") ? IORING_SETUP_SQE128 : 0));
	if (syscall(__NR_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS, &registered, 1))
		fail("io_uring_register");
	for (int i = 0; i < 5; i++) {
		begin = now();
		spin(~0u, 1000000);
		double one = (now() - begin) / 1e6;
		a_spin = one < a_spin ? one : a_spin;
	}
	for (unsigned i = 0; i < samples; i++) {
		unsigned head = atomic_load(ring.cq_head), tail = atomic_load(ring.sq_tail);

		for (unsigned j = 0; j < batch; j++) {
			random ^= random << 13, random ^= random >> 7, random ^= random << 17;
			offer(way, fd, tail + j, memory + j * BLOCK, random % DISK_BLOCKS);
		}
		atomic_store(ring.sq_tail, tail + batch);
		begin = now();
		enter(batch, 0, 0);
		spins = spin(head + batch, is_polled ? DEVICE_SPINS : UINT64_MAX);
		if (is_polled)
			enter(0, batch, IORING_ENTER_GETEVENTS);
		cost[i] = (now() - begin - spins * a_spin) / batch;
		for (unsigned j = 0; j < batch; j++) {
			int result = ring.cqes[(head + j) & ring.cq_mask].res;

			if (result != (is_read ? BLOCK : 0)) {
				errno = -result;
				fail(way);
			}
		}
		atomic_store(ring.cq_head, head + batch);
	}
	qsort(cost, samples, sizeof(*cost), compare);
	printf("%s %u %.0f %.0f %.0f\n", way, batch, cost[samples / 2], cost[samples / 10], cost[samples * 9 / 10]);
}

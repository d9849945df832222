// vhost-reads: random reads of 4 KiB through a split ring with EVENT_IDX, for vhost-reads.py.
//
// It is meant for an emulated processor whose clock counts instructions, so that a nanosecond is an instruction. The
// client does what a driver does: it kicks when the device asks for it, sleeps until an interrupt, takes all completions,
// and offers as many reads again. So a sample holds everything of the processor: client, server, kernel and disk.
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

enum { SECTORS = 8 };

struct client {
	_Atomic uint16_t *avail_index, *used_event, *used_index, *avail_event;
	uint16_t *avail;
	const struct { uint32_t head, length; } *used;
	uint64_t *const *sectors;		// of the header of each chain, by its head
	const uint8_t *const *statuses;
	uint64_t blocks, random;
	uint32_t size, kick, call;
	uint16_t next, seen;
};

struct sample {
	uint64_t instructions, reads, kicks, signals;
};

static uint64_t now(void)
{
	struct timespec at;

	clock_gettime(CLOCK_MONOTONIC, &at);
	return at.tv_sec * 1000000000ull + at.tv_nsec;
}

static void put(struct client *client, uint32_t head)
{
	client->random ^= client->random << 13, client->random ^= client->random >> 7, client->random ^= client->random << 17;
	*client->sectors[head] = client->random % client->blocks * SECTORS;
	client->avail[client->next++ % client->size] = head;
}

static int publish(struct client *client, struct sample *sample)
{
	uint16_t old = atomic_load_explicit(client->avail_index, memory_order_relaxed);
	uint64_t one = 1;

	atomic_store(client->avail_index, client->next);
	if ((uint16_t)(client->next - atomic_load(client->avail_event) - 1) >= (uint16_t)(client->next - old))
		return 0;
	sample->kicks++;
	return write(client->kick, &one, sizeof(one)) == sizeof(one) ? 0 : -errno;
}

// Offers the chains that are not in flight yet, without a sample.
int begin(struct client *client, const uint32_t *heads, uint32_t count)
{
	struct sample none = { 0 };

	for (uint32_t i = 0; i < count; i++)
		put(client, heads[i]);
	return publish(client, &none);
}

// So many reads, each of which is followed by another one when `refills`.
int take(struct client *client, uint64_t reads, int refills, struct sample *sample)
{
	uint64_t began = now(), signals;
	int error;

	*sample = (struct sample){ 0 };
	while (sample->reads < reads) {
		uint16_t used = atomic_load(client->used_index);

		if (used == client->seen) {
			// The interrupt may be one of completions that were seen without it.
			if (read(client->call, &signals, sizeof(signals)) != sizeof(signals))
				return -errno;
			sample->signals += signals;
			continue;
		}
		for (; client->seen != used; client->seen++, sample->reads++) {
			uint32_t head = client->used[client->seen % client->size].head;

			if (*client->statuses[head])
				return -EIO;
			if (refills)
				put(client, head);
		}
		atomic_store(client->used_event, client->seen);
		if (refills) {
			error = publish(client, sample);
			if (error)
				return error;
		}
	}
	sample->instructions = now() - began;
	return 0;
}

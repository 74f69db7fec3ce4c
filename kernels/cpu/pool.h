/* A pool of threads that share out the pieces of one job at a time. */

#ifndef TQCHAT_POOL_H
#define TQCHAT_POOL_H

#include <stddef.h>

/* Does piece `piece` of the job `job`; `thread` is 0 for the caller, below pool_size() for others. */
typedef void (*pool_work)(const void *job, int piece, int thread);

/* How many threads compute, the caller's among them. They start with the first job. */
void pool_resize(int n_threads);
int pool_size(void);

/* One computation holds the pool from pool_enter to pool_leave. */
void pool_enter(void);
void pool_leave(void);

/* Between the two: runs pieces 0 to n - 1 and returns when all are done. */
void pool_run(int n, pool_work work, const void *job);

/* Between the two: memory for each thread and for the computation, in bytes; 0 if there is none. */
int pool_reserve(size_t per_thread, size_t shared);

/* What was reserved, 64-byte aligned. */
void *pool_scratch(int thread);
void *pool_shared(void);

#endif

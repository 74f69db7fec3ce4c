#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

enum { MAX_THREADS = 256 };

/* How long a thread without work waits awake: longer than what lies between two calls of one
 * token, short enough to cost nothing while the program waits for a person. */
static const int64_t AWAKE_NANOSECONDS = 50000;

static pthread_mutex_t one_computation = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t sleep_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static pthread_t threads[MAX_THREADS];
static int n_threads = 1, wanted = 1;
static struct memory {
    void *start;
    size_t size;
} scratch[MAX_THREADS], shared;

/* A job's number in the upper half, how many of its pieces nobody has taken in the lower. A thread
 * that takes a piece of job j by compare-and-swap knows that `work` and `job` are still j's. */
static _Atomic uint64_t pieces;
static _Atomic int unfinished, n_pieces, sleepers, stopping;
static _Atomic(pool_work) work;
static _Atomic(const void *) job;

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Does pieces until none is left to take. */
static void help(int thread) {
    uint64_t seen = atomic_load(&pieces);
    while ((uint32_t)seen) {
        pool_work do_piece = atomic_load_explicit(&work, memory_order_relaxed);
        const void *of_job = atomic_load_explicit(&job, memory_order_relaxed);
        int n = atomic_load_explicit(&n_pieces, memory_order_relaxed);
        if (atomic_compare_exchange_weak(&pieces, &seen, seen - 1)) {
            do_piece(of_job, n - (int)(uint32_t)seen, thread);
            atomic_fetch_sub(&unfinished, 1);
            seen = atomic_load(&pieces);
        }
    }
}

static int has_work(void) { return (uint32_t)atomic_load(&pieces) || atomic_load(&stopping); }

static int is_finished(void) { return !atomic_load(&unfinished); }

/* Waits some microseconds for `over`, then lets others have the core: the thread that is waited
 * for may be one of them. */
static void spin(int (*over)(void)) {
    for (int i = 0; i < 64; i++) {
        if (over())
            return;
        relax();
    }
    sched_yield();
}

static void *serve(void *number) {
    int thread = (int)(intptr_t)number;
    for (;;) {
        int64_t until = nanoseconds() + AWAKE_NANOSECONDS;
        while (!has_work() && nanoseconds() < until)
            spin(&has_work);
        if (!has_work()) {
            pthread_mutex_lock(&sleep_mutex);
            atomic_fetch_add(&sleepers, 1);
            while (!has_work())
                pthread_cond_wait(&wake, &sleep_mutex);
            atomic_fetch_sub(&sleepers, 1);
            pthread_mutex_unlock(&sleep_mutex);
        }
        if (atomic_load(&stopping))
            return NULL;
        help(thread);
    }
}

static void wake_sleepers(void) {
    if (atomic_load(&sleepers)) {
        pthread_mutex_lock(&sleep_mutex);
        pthread_cond_broadcast(&wake);
        pthread_mutex_unlock(&sleep_mutex);
    }
}

static void start(void) {
    while (n_threads < wanted) {
        intptr_t number = n_threads;
        if (pthread_create(&threads[number], NULL, serve, (void *)number))
            return;
        n_threads++;
    }
}

static void stop(void) {
    atomic_store(&stopping, 1);
    wake_sleepers();
    for (int i = 1; i < n_threads; i++)
        pthread_join(threads[i], NULL);
    n_threads = 1;
    atomic_store(&stopping, 0);
}

/* A fork has the forking thread only. */
static void after_fork(void) {
    n_threads = 1;
    pthread_mutex_init(&one_computation, NULL);
    pthread_mutex_init(&sleep_mutex, NULL);
    pthread_cond_init(&wake, NULL);
    atomic_store(&pieces, 0);
    atomic_store(&sleepers, 0);
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, after_fork); }

void pool_resize(int n) {
    pthread_once(&fork_once, watch_forks);
    pool_enter();
    if (n < n_threads)
        stop();
    wanted = n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : n;
    pool_leave();
}

int pool_size(void) { return wanted; }

void pool_enter(void) { pthread_mutex_lock(&one_computation); }
void pool_leave(void) { pthread_mutex_unlock(&one_computation); }

void pool_run(int n, pool_work do_piece, const void *of_job) {
    start();
    if (n <= 1 || n_threads == 1) {
        for (int i = 0; i < n; i++)
            do_piece(of_job, i, 0);
        return;
    }
    atomic_store_explicit(&work, do_piece, memory_order_relaxed);
    atomic_store_explicit(&job, of_job, memory_order_relaxed);
    atomic_store_explicit(&n_pieces, n, memory_order_relaxed);
    atomic_store(&unfinished, n);
    uint64_t number = (atomic_load(&pieces) >> 32) + 1;
    atomic_store(&pieces, number << 32 | (uint32_t)n);
    wake_sleepers();
    help(0);
    while (!is_finished())
        spin(&is_finished);
}

static int reserve(struct memory *memory, size_t size) {
    if (size <= memory->size)
        return 1;
    free(memory->start);
    memory->size = 0;
    if (posix_memalign(&memory->start, 64, size)) {
        memory->start = NULL;
        return 0;
    }
    memory->size = size;
    return 1;
}

int pool_reserve(size_t per_thread, size_t for_all) {
    for (int i = 0; i < wanted; i++)
        if (!reserve(&scratch[i], per_thread))
            return 0;
    return reserve(&shared, for_all);
}

void *pool_scratch(int thread) { return scratch[thread].start; }
void *pool_shared(void) { return shared.start; }

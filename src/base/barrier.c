/*
 * barrier.c - a barrier that spins, and yields when the machine has fewer cores than threads.
 */
#include "base/base.h"

#include <sched.h>

#define SPINS_BEFORE_YIELD 4096

void spin_barrier_init(spin_barrier *barrier) {
    atomic_init(&barrier->arrived, 0);
    atomic_init(&barrier->round, 0);
}

static inline void cpu_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void spin_barrier_wait(spin_barrier *barrier, int n_threads) {
    if (n_threads <= 1) return;
    int round = atomic_load_explicit(&barrier->round, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&barrier->arrived, 1, memory_order_acq_rel) == n_threads - 1) {
        /* Reset before the release: nobody can arrive for the next round until they see it. */
        atomic_store_explicit(&barrier->arrived, 0, memory_order_relaxed);
        atomic_fetch_add_explicit(&barrier->round, 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&barrier->round, memory_order_acquire) == round;) {
        if (++spins < SPINS_BEFORE_YIELD)
            cpu_pause();
        else
            sched_yield();
    }
}

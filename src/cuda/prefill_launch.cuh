/*
 * prefill_launch.cuh - fills a plan for one instance of the prefill kernel: the most warps whose shared memory
 * the device has.
 */
#ifndef OSCAR_CUDA_PREFILL_LAUNCH_CUH
#define OSCAR_CUDA_PREFILL_LAUNCH_CUH

#include "prefill.cuh"

template <class C, int MODE>
bool prefill_plan_mode(DecodePlan *plan, const DecodeNeeds *needs, size_t shared_max) {
    plan->tile_rows = C::WARPS * C::ROWS;
    plan->row_tiles = (needs->rows + plan->tile_rows - 1) / plan->tile_rows;
    plan->n_ctas = 0;
    plan->shared_bytes = prefill_bytes<C>(MODE == MODE_PLAIN ? 0 : needs->bias_steps);
    plan->n_threads = C::THREADS;
    plan->kernel = prefill_kernel<C, MODE>;
    return plan->shared_bytes <= shared_max;
}

template <int D, int ROWS, int STAGES>
bool prefill_plan(DecodePlan *plan, const DecodeNeeds *needs, size_t shared_max) {
    if (needs->high)
        return prefill_plan_mode<Config<D, ROWS, 8, STAGES, true>, MODE_BIAS_CAP>(plan, needs, shared_max) ||
               prefill_plan_mode<Config<D, ROWS, 2, STAGES, true>, MODE_BIAS_CAP>(plan, needs, shared_max);
    if (needs->capped || needs->bias_steps)
        return prefill_plan_mode<Config<D, ROWS, 8, STAGES>, MODE_BIAS_CAP>(plan, needs, shared_max) ||
               prefill_plan_mode<Config<D, ROWS, 4, STAGES>, MODE_BIAS_CAP>(plan, needs, shared_max) ||
               prefill_plan_mode<Config<D, ROWS, 2, STAGES>, MODE_BIAS_CAP>(plan, needs, shared_max);
    return prefill_plan_mode<Config<D, ROWS, 8, STAGES>, MODE_PLAIN>(plan, needs, shared_max) ||
           prefill_plan_mode<Config<D, ROWS, 4, STAGES>, MODE_PLAIN>(plan, needs, shared_max);
}

#endif

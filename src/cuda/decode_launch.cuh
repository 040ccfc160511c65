/*
 * decode_launch.cuh - fills a plan for one instance of the decode kernel.
 *
 * Instances with many stages are compiled for devices with bulk copies, those that fit 99 KB of
 * shared memory for the others; on the wrong architecture a body is empty.
 */
#ifndef OSCAR_CUDA_DECODE_LAUNCH_CUH
#define OSCAR_CUDA_DECODE_LAUNCH_CUH

#include "decode.cuh"

template <class C> DecodePlan plan_of(int rows, void (*kernel)(const DecodeParams), int bias_steps) {
    static_assert(Merge<C>::SLOT_FLOATS <= DECODE_MAX_SLOT_FLOATS, "workspace");
    DecodePlan plan;
    plan.tile_rows = C::ROWS;
    plan.row_tiles = (rows + C::ROWS - 1) / C::ROWS;
    plan.n_ctas = 0;
    plan.shared_bytes = shared_bytes<C>(bias_steps, DECODE_MAX_CTAS);
    plan.n_threads = C::THREADS;
    plan.kernel = kernel;
    return plan;
}

template <class C> bool plan_kernel(DecodePlan *plan, int rows, bool capped, int bias_steps) {
    *plan = capped ? plan_of<C>(rows, decode_kernel<C, MODE_BIAS_CAP>, bias_steps)
            : bias_steps ? plan_of<C>(rows, decode_kernel<C, MODE_BIAS>, bias_steps)
                         : plan_of<C>(rows, decode_kernel<C, MODE_PLAIN>, 0);
    return true;
}

#endif

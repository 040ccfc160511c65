/*
 * decode_launch.cuh - fills a plan for one instance of the decode kernel.
 *
 * Instances with many stages are compiled for devices with bulk copies, those that fit 99 KB of
 * shared memory for the others; on the wrong architecture a body is empty.
 */
#ifndef OSCAR_CUDA_DECODE_LAUNCH_CUH
#define OSCAR_CUDA_DECODE_LAUNCH_CUH

#include "decode.cuh"

template <class C, int MODE> bool plan_mode(DecodePlan *plan, const DecodeNeeds *needs) {
    static_assert(Merge<C>::SLOT_FLOATS <= DECODE_MAX_SLOT_FLOATS, "workspace");
    static_assert(!C::MIRRORED || C::WARPS == 8 || C::WARPS == 12 || C::WARPS == 16, "the layer has tables for these");
    plan->tile_rows = C::ROWS;
    plan->row_tiles = (needs->rows + C::ROWS - 1) / C::ROWS;
    plan->n_ctas = 0;
    plan->shared_bytes = shared_bytes<C>(needs->bias_steps);
    plan->n_threads = C::THREADS;
    plan->unit_pad = C::FOUR_ROWS ? 3 : 0;
    plan->mirror_pages = C::MIRRORED ? C::WARPS : 0;
    plan->kernel = decode_kernel<C, MODE>;
    return true;
}

/* Shared memory of a block of devices with bulk copies. */
#define MOST_SHARED (227 * 1024)

/* How a configuration makes the bias of more than 16 pairs. */
template <class C, bool RUNS> struct ManyPairs {
    typedef C Form;
};
template <class C> struct ManyPairs<C, true> {
    typedef Runs<C> Form;
};

/* How it makes that of up to 16. */
template <class C, bool FEW> struct FewPairs {
    typedef C Form;
};
template <class C> struct FewPairs<C, true> {
    typedef FewRuns<C> Form;
};

template <class C> bool plan_kernel(DecodePlan *plan, const DecodeNeeds *needs) {
    typedef typename ManyPairs<C, C::MIRRORED>::Form Many;
    constexpr bool few = C::MIRRORED && C::TILES == 2 && shared_bytes<FewRuns<C>>(2) <= MOST_SHARED;
    typedef typename FewPairs<C, few>::Form Few;
    return needs->capped           ? plan_mode<C, MODE_BIAS_CAP>(plan, needs)
           : needs->bias_steps > 2 ? plan_mode<Many, MODE_BIAS>(plan, needs)
           : needs->bias_steps     ? plan_mode<Few, MODE_BIAS_16>(plan, needs)
                                   : plan_mode<C, MODE_PLAIN>(plan, needs);
}

/* Fewer instances: layers of more than two bits are few. */
template <class C> bool plan_kernel_high(DecodePlan *plan, const DecodeNeeds *needs) {
    return needs->capped || needs->bias_steps > 2 ? plan_mode<C, MODE_BIAS_CAP>(plan, needs)
           : needs->bias_steps                    ? plan_mode<C, MODE_BIAS_16>(plan, needs)
                                                  : plan_mode<C, MODE_PLAIN>(plan, needs);
}

#endif

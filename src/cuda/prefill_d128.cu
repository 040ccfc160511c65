/* prefill_d128.cu - prefill kernels of head_dim 128. */
#include "prefill_launch.cuh"

bool prefill_plan_d128(DecodePlan *plan, const DecodeNeeds *needs, size_t shared_max) {
    return prefill_plan_wgmma(plan, needs, shared_max) || prefill_plan<128, 32, 4>(plan, needs, shared_max);
}

/* prefill_d64.cu - prefill kernels of head_dim 64. */
#include "prefill_launch.cuh"

bool prefill_plan_d64(DecodePlan *plan, const DecodeNeeds *needs, size_t shared_max) {
    return prefill_plan<64, 32, 4>(plan, needs, shared_max);
}

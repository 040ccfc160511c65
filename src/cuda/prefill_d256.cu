/* prefill_d256.cu - prefill kernels of head_dim 256. */
#include "prefill_launch.cuh"

bool prefill_plan_d256(DecodePlan *plan, const DecodeNeeds *needs, size_t shared_max) {
    return prefill_plan<256, 16, 3>(plan, needs, shared_max);
}

/* decode_d64.cu - decode kernels of head_dim 64. */
#include "decode_launch.cuh"

bool decode_plan_d64(DecodePlan *plan, const DecodeNeeds *needs) {
    if (needs->bulk) {
        if (needs->rows <= 4) return plan_kernel<Config<64, 4, 16, 4>>(plan, needs);
        if (needs->rows <= 8) return plan_kernel<Config<64, 8, 16, 4>>(plan, needs);
        return plan_kernel<Config<64, 16, 8, 8>>(plan, needs);
    }
    return plan_kernel<Config<64, 8, 4, 4>>(plan, needs);
}

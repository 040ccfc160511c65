/* decode_d128.cu - decode kernels of head_dim 128. */
#include "decode_launch.cuh"

bool decode_plan_d128(DecodePlan *plan, const DecodeNeeds *needs) {
    if (needs->bulk) {
        if (needs->rows <= 4) return plan_kernel<Config<128, 4, 12, 3>>(plan, needs);
        if (needs->rows <= 8) return plan_kernel<Config<128, 8, 12, 3>>(plan, needs);
        if (needs->rows <= 12) return plan_kernel<Config<128, 12, 8, 4>>(plan, needs);
        return plan_kernel<Config<128, 16, 8, 4>>(plan, needs);
    }
    if (needs->rows <= 4) return plan_kernel<Config<128, 4, 4, 2>>(plan, needs);
    return plan_kernel<Config<128, 8, 4, 2>>(plan, needs);
}

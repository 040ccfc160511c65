/* decode_high.cu - decode kernels of layers whose keys or values have 3 or 4 bits. A stage holds the
 * largest tile; with tiles that large, few stages keep memory busy. */
#include "decode_launch.cuh"

bool decode_plan_high_d64(DecodePlan *plan, const DecodeNeeds *needs) {
    if (!needs->bulk) return plan_kernel_high<Config<64, 8, 4, 4, true>>(plan, needs);
    if (needs->rows <= 4) return plan_kernel_high<Config<64, 4, 12, 3, true>>(plan, needs);
    return plan_kernel_high<Config<64, 8, 12, 3, true>>(plan, needs);
}

bool decode_plan_high_d128(DecodePlan *plan, const DecodeNeeds *needs) {
    if (!needs->bulk) return plan_kernel_high<Config<128, 8, 4, 2, true>>(plan, needs);
    if (needs->rows <= 4) return plan_kernel_high<Config<128, 4, 8, 2, true>>(plan, needs);
    return plan_kernel_high<Config<128, 8, 8, 2, true>>(plan, needs);
}

bool decode_plan_high_d256(DecodePlan *plan, const DecodeNeeds *needs) {
    if (!needs->bulk) return plan_kernel_high<Config<256, 8, 3, 1, true>>(plan, needs);
    return plan_kernel_high<Config<256, 8, 4, 2, true>>(plan, needs);
}

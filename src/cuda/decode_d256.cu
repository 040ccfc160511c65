/* decode_d256.cu - decode kernels of head_dim 256. More than 8 rows take several passes: their
 * accumulators would not fit the registers. */
#include "decode_launch.cuh"

bool decode_plan_d256(DecodePlan *plan, const DecodeNeeds *needs) {
    if (needs->bulk && needs->bias_steps > 12) { /* the table takes the room of a quarter of the ring */
        if (needs->rows <= 4) return plan_kernel<Config<256, 4, 6, 2>>(plan, needs);
        return plan_kernel<Config<256, 8, 6, 2>>(plan, needs);
    }
    if (needs->bulk) {
        if (needs->rows <= 4) return plan_kernel<Config<256, 4, 8, 2>>(plan, needs);
        return plan_kernel<Config<256, 8, 8, 2>>(plan, needs);
    }
    return plan_kernel<Config<256, 8, 4, 1>>(plan, needs);
}

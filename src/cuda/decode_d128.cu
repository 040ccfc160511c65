/* decode_d128.cu - decode kernels of head_dim 128. */
#include "decode_launch.cuh"

bool decode_plan_d128(DecodePlan *plan, int rows, bool bulk, bool capped, int bias_steps) {
    const int tile_rows = rows <= 4 ? 4 : rows <= 8 ? 8 : rows <= 12 ? 12 : 16;
    if (bulk) {
        switch (tile_rows) {
        case 4: return plan_kernel<Config<128, 4, 12, 3>>(plan, rows, capped, bias_steps);
        case 8: /* a large table of the key bias takes the room of a stage */
            return bias_steps > 4 ? plan_kernel<Config<128, 8, 8, 4>>(plan, rows, capped, bias_steps)
                                  : plan_kernel<Config<128, 8, 8, 5>>(plan, rows, capped, bias_steps);
        case 12: return plan_kernel<Config<128, 12, 8, 4>>(plan, rows, capped, bias_steps);
        default: return plan_kernel<Config<128, 16, 8, 4>>(plan, rows, capped, bias_steps);
        }
    }
    return rows <= 4 ? plan_kernel<Config<128, 4, 4, 2>>(plan, rows, capped, bias_steps)
                     : plan_kernel<Config<128, 8, 4, 2>>(plan, rows, capped, bias_steps);
}

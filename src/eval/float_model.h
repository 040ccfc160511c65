/*
 * float_model.h - a copy of a GGUF model with float32 weights.
 *
 * With quantised weights ggml rounds activations to 8 bits before each product, so the least change
 * of a cache, BF16 rows for float32 ones say, moves the next-token distribution (SmolLM2: a KL of
 * .003). With float32 weights nothing is rounded, and what a comparison measures is the cache alone.
 */
#ifndef OSCAR_FLOAT_MODEL_H
#define OSCAR_FLOAT_MODEL_H

#include "eval/text.h"

/* Writes `to` (atomically) from `from`: every tensor dequantised to float32, metadata kept.
 * progress: tensors done and all of them; NULL is allowed.
 * Errors: IO, FORMAT, MEMORY, UNSUPPORTED (a tensor type that ggml cannot widen, named). */
oscar_status float_model_write(const char *from, const char *to, text_progress progress,
                               oscar_error *error);

#endif

/*
 * zoo.h - files that hold rotations: listing them, and converting between formats.
 *
 * Three formats are known:
 *   safetensors  our own rotation files (docs/FORMAT.md); any other safetensors file can be listed
 *   .pt          RotationZoo, the published format of OSCAR: a torch archive, one file for the key
 *                side and one for the value side. The reader runs no code of the file.
 *   GGUF         tensors blk.{i}.attn_k_rot.weight and attn_v_rot.weight inside a model
 *
 * Example: from RotationZoo to our format
 *
 *   oscar_zoo_file *k, *v;
 *   oscar_rotations *r;
 *   oscar_zoo_open(&k, "k_rotation_qqt_r_h_pbr.pt", &error);
 *   oscar_zoo_open(&v, "v_rotation_sst_r_h_pbr.pt", &error);
 *   oscar_zoo_to_rotations(&r, k, v, layers, n_layers, &error);
 *   oscar_rotations_save(r, "model.safetensors", &error);
 *
 * An opened file is immutable, holds what it needs in memory and may be used by several threads.
 */
#ifndef OSCAR_ZOO_H
#define OSCAR_ZOO_H

#include "oscar/oscar.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum oscar_zoo_format {
    OSCAR_ZOO_SAFETENSORS = 1,
    OSCAR_ZOO_PT = 2,
    OSCAR_ZOO_GGUF = 3
} oscar_zoo_format;

/* The two sides of the cache that a rotation belongs to. */
typedef enum oscar_zoo_side { OSCAR_ZOO_KEY = 0, OSCAR_ZOO_VALUE = 1 } oscar_zoo_side;

#define OSCAR_ZOO_MAX_DIMS 8

/* One tensor of a file. Strings live as long as the oscar_zoo_file. */
typedef struct oscar_zoo_tensor {
    const char *name;  /* .pt: layers.{id}.{key} */
    const char *dtype; /* "F32", "BF16", ... */
    int32_t n_dims;
    uint64_t shape[OSCAR_ZOO_MAX_DIMS]; /* row major: the last dimension is contiguous */
} oscar_zoo_tensor;

typedef struct oscar_zoo_file oscar_zoo_file;

/* Opens a file of any of the three formats; which one is told by its first bytes, not its name.
 * safetensors: the header is read and checked. .pt: everything is read. GGUF: the header is
 * checked, and only rotation tensors are read and listed.
 * Errors: IO, FORMAT (position: byte offset), NOT_FINITE, UNSUPPORTED (newer version), MEMORY. */
OSCAR_API oscar_status oscar_zoo_open(oscar_zoo_file **out, const char *path, oscar_error *error);
OSCAR_API void oscar_zoo_free(oscar_zoo_file *file); /* NULL is allowed */

OSCAR_API int32_t oscar_zoo_get_format(const oscar_zoo_file *file); /* oscar_zoo_format */
/* The format_version of a .pt (1: rotations alone; 2 and 3: means and companions as well) or of a
 * rotation file of ours, the GGUF version; 0 where there is none. */
OSCAR_API int32_t oscar_zoo_get_version(const oscar_zoo_file *file);
/* Layers that have a rotation; their ids need not be contiguous. */
OSCAR_API int32_t oscar_zoo_n_layers(const oscar_zoo_file *file);
OSCAR_API int32_t oscar_zoo_n_tensors(const oscar_zoo_file *file);
/* ARGUMENT when index is out of range. */
OSCAR_API oscar_status oscar_zoo_get_tensor(const oscar_zoo_file *file, int32_t index,
                                            oscar_zoo_tensor *out);
/* Metadata pairs as text ("objective", "source_grouping" of a .pt, "model", ... of
 * ours). NULL when index is out of range. */
OSCAR_API int32_t oscar_zoo_n_metadata(const oscar_zoo_file *file);
OSCAR_API const char *oscar_zoo_metadata_key(const oscar_zoo_file *file, int32_t index);
OSCAR_API const char *oscar_zoo_metadata_value(const oscar_zoo_file *file, int32_t index);

/* Rotations of the published recipe (OSCAR_RECIPE_ZOO, clips 0.96 for keys and 0.92 for values,
 * 2 bits) from a file for the keys and one for the values; both may be the same GGUF file. A
 * [d, d] matrix serves every KV head. `layers` [n_layers] is the model's geometry; layer i takes
 * the file's layer id i. NULL for a side: no rotation there.
 * Errors: ARGUMENT, MISMATCH (a layer is missing, other head_dim or number of heads; the message
 * names layer, found and expected), UNSUPPORTED (a safetensors file: load it instead; a rotation
 * that is not orthogonal, which versions 2 and 3 of the .pt format allow). */
OSCAR_API oscar_status oscar_zoo_to_rotations(oscar_rotations **out, const oscar_zoo_file *k,
                                              const oscar_zoo_file *v, const oscar_layer *layers,
                                              int32_t n_layers, oscar_error *error);

/* Writes one side of `rotations` as a RotationZoo file that torch.load reads, atomically: [d, d] for
 * a layer whose heads all share one matrix, else [H, d, d]; k_mean where there is one (the file's
 * format_version is then 2, else 1). No eigenvalues: they are not kept. What the format has no
 * field for (recipe, bits, tracked and value means, metric) is a MISMATCH unless `lossy` is set.
 * Errors: ARGUMENT, MISMATCH, UNSUPPORTED (beyond 4 GiB), IO, MEMORY. */
OSCAR_API oscar_status oscar_zoo_write_pt(const oscar_rotations *rotations, int32_t side,
                                          bool lossy, const char *path, oscar_error *error);

#ifdef __cplusplus
}
#endif

#endif

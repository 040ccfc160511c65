/*
 * rotation_file.h - what a rotation file of ours stores for a layer; one table for both directions.
 */
#ifndef OSCAR_ROTATION_FILE_H
#define OSCAR_ROTATION_FILE_H

#include "zoo/zoo.h"

#define ROTATION_FILE_FORMAT "oscar-rotations"
#define ROTATION_FILE_VERSION 1

/* Float arrays: tensor layers.{i}.{name}, F32. An absent tensor is a NULL array. */
typedef enum rotation_shape {
    ROTATION_SQUARE = 0, /* [H, d, d] in memory and in the file */
    ROTATION_ROW = 1,    /* [H, d] */
    ROTATION_LOWER = 2   /* [H, d, d] unit lower triangular in memory; in the file
                            [H, d (d - 1) / 2], what is below the diagonal, row by row */
} rotation_shape;
typedef struct rotation_field {
    const char *name;
    size_t member; /* of rotations_layer, a float pointer */
    rotation_shape shape;
} rotation_field;
#define ROTATION_N_FIELDS 9
extern const rotation_field rotation_fields[ROTATION_N_FIELDS];

/* Whole numbers: metadata layers.{i}.{name}, decimal. */
typedef struct rotation_number {
    const char *name;
    size_t member; /* of rotations_layer: int32_t, or bool where is_bool */
    bool is_bool;
    int32_t least, most;
} rotation_number;
#define ROTATION_N_NUMBERS 12
extern const rotation_number rotation_numbers[ROTATION_N_NUMBERS];

/* Real numbers: metadata layers.{i}.{name}, decimal with a point whatever the locale. */
typedef struct rotation_real {
    const char *name;
    size_t member; /* of rotations_layer, a float */
} rotation_real;
#define ROTATION_N_REALS 3
extern const rotation_real rotation_reals[ROTATION_N_REALS];

/* "layers.{i}.{name}" */
#define ROTATION_NAME_BYTES 64
void rotation_name(char *out, int32_t layer, const char *name);
/* True for metadata keys that the format itself uses. */
bool rotation_key_reserved(const char *key);

float **rotation_array(const rotations_layer *layer, const rotation_field *field);
int32_t rotation_number_get(const rotations_layer *layer, const rotation_number *number);
float rotation_real_get(const rotations_layer *layer, const rotation_real *real);
/* Floats of one head, in memory and in the file; d <= OSCAR_MAX_HEAD_DIM. */
size_t rotation_head_floats(const rotation_field *field, int32_t head_dim);
size_t rotation_head_file_floats(const rotation_field *field, int32_t head_dim);

/* Files that break these rules are neither written nor read; `status` says which of the two is
 * being reported (ARGUMENT or FORMAT). The numbers of a layer come first, because the sizes of its
 * arrays follow from them; then everything, by rotations_check(). */
oscar_status rotation_numbers_check(const rotations_layer *layer, int32_t index, const char *path,
                                    oscar_status status, oscar_error *error);
oscar_status rotation_contents_check(const oscar_rotations *rotations, const char *path,
                                     oscar_status status, oscar_error *error);

#endif

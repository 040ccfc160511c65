/*
 * methods.h - the rotations behind a method of `oscar eval`.
 */
#ifndef OSCAR_METHODS_H
#define OSCAR_METHODS_H

#include "eval/compare.h"

/* Rotations of the methods that need no calibration (quarot, naive, kivi); NULL for the others. */
oscar_status method_rotations(const compare_method *method, const oscar_layer *layers, int32_t n_layers,
                              oscar_rotations **out, oscar_error *error);

#endif

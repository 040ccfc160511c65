/*
 * memory.h - what benchmarks and tests of the GPU share: device memory from vectors and back. Errors end the program.
 */
#ifndef OSCAR_BENCH_CUDA_MEMORY_H
#define OSCAR_BENCH_CUDA_MEMORY_H

#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <vector>

#include "oscar/cuda.h"

static inline void check(cudaError_t code, const char *what) {
    if (code == cudaSuccess) return;
    fprintf(stderr, "FAILED %s: %s\n", what, cudaGetErrorString(code));
    exit(1);
}
static inline void check(oscar_status status, const oscar_error &error) {
    if (status == OSCAR_OK) return;
    fprintf(stderr, "FAILED %s\n", error.message);
    exit(1);
}

/* NULL of nothing. */
template <class T> static T *upload(const std::vector<T> &v) {
    if (v.empty()) return NULL;
    T *p;
    check(cudaMalloc(&p, v.size() * sizeof(T)), "cudaMalloc");
    check(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
    return p;
}

/* n elements of device memory. */
template <class T> static std::vector<T> download(const T *p, size_t n) {
    std::vector<T> v(n);
    check(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return v;
}

#endif

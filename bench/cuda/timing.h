/*
 * timing.h - what the benchmarks that time launches of their own share: errors end the program, and times are
 * medians over replays of a CUDA graph. (bench_decode measures through oscar_cuda_measure().)
 */
#ifndef OSCAR_BENCH_CUDA_TIMING_H
#define OSCAR_BENCH_CUDA_TIMING_H

#include "memory.h"

/* Median time in us of one of n launches in a graph; the first replay warms up. launch(stream). */
template <class F> static float time_graph(int n, int replays, F launch) {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t start, stop;
    check(cudaStreamCreate(&stream), "stream");
    check(cudaEventCreate(&start), "event");
    check(cudaEventCreate(&stop), "event");
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    for (int i = 0; i < n; i++) launch(stream);
    check(cudaStreamEndCapture(stream, &graph), "capture");
    check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    std::vector<float> times;
    for (int r = 0; r <= replays; r++) {
        check(cudaEventRecord(start, stream), "record");
        check(cudaGraphLaunch(exec, stream), "launch");
        check(cudaEventRecord(stop, stream), "record");
        check(cudaStreamSynchronize(stream), "synchronize");
        float ms;
        check(cudaEventElapsedTime(&ms, start, stop), "elapsed");
        if (r > 0) times.push_back(ms * 1000 / n);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

#endif

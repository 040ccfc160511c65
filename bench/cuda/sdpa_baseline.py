"""BF16 decode attention through torch, cuDNN and FlashAttention: the baseline of bench_decode.

Inside a CUDA graph, over rotated buffers, as bench_decode does. Prints the median time of a call.
Usage: sdpa_baseline.py [quick]
"""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS = 8


def time_graph(calls, repeats=9):
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return sorted(times)[len(times) // 2]


def bench(batch, tokens, group, dim, backend):
    free = torch.cuda.mem_get_info()[0]
    size = batch * tokens * HEADS * dim * 4
    n_sets = max(1, min(8, int(free * 0.8 // size)))
    shape = (batch, tokens, HEADS, dim)
    keys = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(n_sets)]
    values = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(n_sets)]
    q = torch.randn(batch, HEADS * group, 1, dim, device="cuda", dtype=torch.bfloat16)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel(backend):
        us = time_graph([lambda k=k, v=v: sdpa(q, k, v, enable_gqa=True) for k, v in zip(keys, values)])
    print(f"sdpa {backend.name:16s} d {dim} B {batch} T {tokens} GQA {group}: {us:.1f} us, {size / us / 1e3:.0f} GB/s")


def main():
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "cuDNN", torch.backends.cudnn.version())
    cases = [(1, 100000, 4, 128), (32, 100000, 4, 128)]
    if "quick" not in sys.argv:
        cases += [(1, 100000, 8, 128), (1, 100000, 12, 128), (32, 100000, 8, 128), (32, 100000, 12, 128)]
        cases += [(b, t, 4, d) for d in (64, 256) for b in (1, 32) for t in (32768, 131072) if b * t * d < 2**30]
    for case in cases:
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            if backend == SDPBackend.FLASH_ATTENTION and case[0] > 1:
                continue
            try:
                bench(*case, backend)
            except RuntimeError as error:
                print("sdpa", backend.name, case, "failed:", str(error).splitlines()[0][:100])
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

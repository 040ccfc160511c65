"""BF16 attention of the last chunk of a prompt through torch, cuDNN and FlashAttention: the baseline of
bench_prefill. Prints the median time of a call. Usage: sdpa_prefill.py [CHUNK]
"""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

HEADS, GROUP, DIM = 8, 4, 128


def bench(tokens, chunk, backend):
    k = torch.randn(1, HEADS, tokens, DIM, device="cuda", dtype=torch.bfloat16)
    v = torch.randn_like(k)
    q = torch.randn(1, HEADS * GROUP, chunk, DIM, device="cuda", dtype=torch.bfloat16)
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def call():
        # Queries are the last tokens of the history: without the mask's corner where that is not offered.
        if backend == SDPBackend.FLASH_ATTENTION:
            return sdpa(q, k, v, attn_mask=causal_lower_right(chunk, tokens), enable_gqa=True)
        return sdpa(q, k, v, enable_gqa=True)

    with sdpa_kernel(backend):
        for _ in range(3):
            call()
        times = []
        for _ in range(9):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop) * 1e3)
    us = sorted(times)[4]
    flops = 4.0 * (chunk * tokens - 0.5 * chunk * (chunk - 1)) * DIM * HEADS * GROUP
    print(f"sdpa prefill {backend.name:16s} chunk {chunk} of {tokens}: {us:.0f} us, {flops / us / 1e6:.0f} TFLOP/s of visible pairs")


def main():
    chunk = int(sys.argv[1]) if len(sys.argv) > 1 else 2048
    for tokens in (8192, 32768, 100000):
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            try:
                bench(tokens, chunk, backend)
            except Exception as error:  # a backend that refuses says why
                print("sdpa prefill", backend.name, tokens, "failed:", str(error).splitlines()[0][:100])


if __name__ == "__main__":
    main()

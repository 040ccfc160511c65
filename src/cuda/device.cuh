/*
 * device.cuh - the machine instructions the kernels are made of, and the ring that feeds them.
 */
#ifndef OSCAR_CUDA_DEVICE_CUH
#define OSCAR_CUDA_DEVICE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#define DEVICE __device__ __forceinline__
#define FULL_WARP 0xffffffffu

/* Compute capability 9.0 and later have bulk copies and memory barriers that count bytes; before
 * that the ring is filled by every lane's own asynchronous copies. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define HAVE_BULK_COPY 1
#else
#define HAVE_BULK_COPY 0
#endif

DEVICE void mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                    uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DEVICE void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                     uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* Bytes: unsigned times signed. */
DEVICE void mma_bytes(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* Transposes an 8 x 8 matrix of 16-bit elements spread over the warp. */
DEVICE uint32_t transpose8x8(uint32_t x) {
    uint32_t r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}

DEVICE void load_transposed(uint32_t address, uint32_t &r0, uint32_t &r1, uint32_t &r2,
                            uint32_t &r3) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
                 : "r"(address));
}

DEVICE float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

DEVICE float sqrt_fast(float x) {
    float r;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

DEVICE uint32_t half2_bits(__half2 h) { return *reinterpret_cast<uint32_t *>(&h); }
DEVICE __half2 bits_half2(uint32_t u) { return *reinterpret_cast<__half2 *>(&u); }
DEVICE uint32_t pack_half2(float lo, float hi) { return half2_bits(__floats2half2_rn(lo, hi)); }
DEVICE uint32_t pack_bf162(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
DEVICE uint32_t fma_bf162(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
DEVICE uint32_t mul_bf162(uint32_t a, uint32_t b) { return fma_bf162(a, b, 0x80008000u); }
DEVICE uint32_t min_bf162(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
DEVICE uint32_t max_bf162(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
DEVICE float bf16_low(uint32_t u) { return __uint_as_float(u << 16); }
DEVICE float bf16_high(uint32_t u) { return __uint_as_float(u & 0xffff0000u); }

DEVICE uint32_t shared_address(const void *p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/* Loads that stay where the program puts them: the order of the first loads decides how long a
 * short launch takes. */
DEVICE int load_int(const int *p) {
    int r;
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(r) : "l"(p));
    return r;
}
DEVICE uint32_t load_u16(const uint16_t *p) {
    unsigned short r;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(r) : "l"(p));
    return r;
}
DEVICE uint4 load_uint4(const void *p) {
    uint4 r;
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(p));
    return r;
}

/* What every step reads again: it stays in the cache when tiles flow through. */
DEVICE uint4 load_kept(const void *p) {
    uint4 r;
    asm volatile("{\n\t.reg .b64 policy;\n\t"
                 "createpolicy.fractional.L2::evict_last.b64 policy, 1.0;\n\t"
                 "ld.global.nc.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], policy;\n\t}"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(p));
    return r;
}

/* The thread's index as a value that the loops around do not know: what cold code derives from it is
 * computed there and takes no registers of the loop. */
DEVICE int thread_index() {
    int r;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r));
    return r;
}

/* A value that all lanes have, known to be one: in a register of the warp, as what follows from it, and a branch on it does not
 * part the lanes. */
DEVICE int uniform(int x) { return __shfl_sync(FULL_WARP, x, 0); }
#if HAVE_BULK_COPY
/* True in one lane of a whole warp, which the compiler knows to be one. */
DEVICE bool elected() {
    uint32_t r;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(r));
    return r != 0;
}
#endif
DEVICE int warp_index() { return uniform(threadIdx.x >> 5); }

/* x / n for 0 <= x < 65536, n < 65536; magic: ceil(2^32 / n) for n > 1. */
DEVICE int divide(int x, int n, uint32_t magic) {
    return n == 1 ? x : static_cast<int>(__umulhi(static_cast<uint32_t>(x), magic));
}

/* 16 bytes of shared memory, not kept in registers from an earlier load. */
DEVICE void load_shared(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

DEVICE void store_shared(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE void store_shared(uint32_t address, uint32_t a) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(a) : "memory");
}

DEVICE uint32_t atomic_add_acq_rel(uint32_t *p, uint32_t v) {
    uint32_t old;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(p), "r"(v)
                 : "memory");
    return old;
}

/* Programmatic dependent launch: the next kernel may take multiprocessors that this one leaves; what this one does
 * after the wait sees all that the kernel before it wrote. */
DEVICE void let_next_kernel_start() {
#if HAVE_BULK_COPY
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void wait_for_kernel_before() {
#if HAVE_BULK_COPY
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Between a thread's own stores to shared memory and bulk copies to the same place. */
DEVICE void fence_before_copies() {
#if HAVE_BULK_COPY
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#if HAVE_BULK_COPY
/* Barriers in shared memory, 8 bytes each. */
DEVICE void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void barrier_wait(uint32_t barrier, uint32_t phase) {
    asm volatile("{\n\t.reg .pred p;\n\t"
                 "WAIT_%=:\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n\t"
                 "@p bra DONE_%=;\n\t"
                 "bra WAIT_%=;\n\t"
                 "DONE_%=:\n\t}" ::"r"(barrier),
                 "r"(phase)
                 : "memory");
}
/* One thread: arrives at the barrier and copies a tile, which is read once: it goes first from the cache. */
DEVICE void bulk_copy(uint32_t to, const void *from, int bytes, uint32_t barrier) {
    uint64_t policy;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
                 : "memory");
}
#endif

/* A warp's ring of stages in shared memory. */
template <int STAGES, int STAGE_BYTES> struct Ring {
    uint32_t data;     /* shared address of this warp's stages */
    uint32_t barriers; /* shared address of this warp's barriers, 8 bytes each */
    int stage;
    uint32_t phase;

    DEVICE void init(int lane) {
        stage = 0;
        phase = 0;
#if HAVE_BULK_COPY
        if (lane < STAGES) {
            barrier_init(barriers + 8 * lane, 1);
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
        __syncwarp();
#endif
    }

    /* Copies that one lane starts, or, without bulk copies, the whole warp: then also without data
     * (bytes 0), so that copies can be counted. Tiles are read once: they go first from the cache. */
    DEVICE void copy(int to, const void *from, int bytes, int lane) {
        const uint32_t destination = data + to * STAGE_BYTES;
#if HAVE_BULK_COPY
        bulk_copy(destination, from, bytes, barriers + 8 * to);
#else
        for (int i = 16 * lane; i < bytes; i += 512)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination + i),
                         "l"(static_cast<const uint8_t *>(from) + i)
                         : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }

    /* Two pieces of the same length, one after the other. */
    DEVICE void copy_two(int to, const void *a, const void *b, int bytes, int lane) {
        const uint32_t destination = data + to * STAGE_BYTES;
#if HAVE_BULK_COPY
        const uint32_t barrier = barriers + 8 * to;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(2 * bytes)
                     : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1], %2, [%3];" ::"r"(destination),
                     "l"(a), "r"(bytes), "r"(barrier)
                     : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1], %2, [%3];" ::"r"(destination + bytes),
                     "l"(b), "r"(bytes), "r"(barrier)
                     : "memory");
#else
        for (int i = 16 * lane; i < bytes; i += 512) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination + i),
                         "l"(static_cast<const uint8_t *>(a) + i)
                         : "memory");
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination + bytes + i),
                         "l"(static_cast<const uint8_t *>(b) + i)
                         : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }

    DEVICE void wait() {
#if HAVE_BULK_COPY
        barrier_wait(barriers + 8 * stage, phase);
#else
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
        __syncwarp();
#endif
    }

    DEVICE void next() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

#endif

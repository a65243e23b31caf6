// What every source here begins with. The structs (Source, Target, ...) stand before it, written out from the NumPy
// dtypes that the host fills. Strides, pitches and offsets are bytes; only pictures and whole planes need 64 bits.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define WARP 32
#define ALL_LANES 0xffffffffu

__device__ __forceinline__ int clip(int value, int low, int high) { return min(max(value, low), high); }

// a / b. Where both fit 32 bits a product with `magic`, 2**64 / b rounded up (0 for b == 1), is exact and many times as
// fast: it is too large by less than a / 2**64, which is less than 1 / b.
__device__ __forceinline__ u64 divided(u64 a, u64 b, u64 magic)
{
    if ((a | b) >> 32)
        return a / b;
    return magic ? __umul64hi(a, magic) : a;
}

// One warp copies n bytes from shared memory (aligned to 4 bytes, to 16 if WIDE; 4 more may be read) to any address of
// device memory, so that each access of the warp covers whole sectors however the row is aligned.
template <bool WIDE>
__device__ __forceinline__ void store_row(u8* to, const u8* from, int n, int lane)
{
    if (WIDE && ((size_t)to & 15) == 0) {
        for (int at = lane * 16; at + 16 <= n; at += WARP * 16)
            *(uint4*)(to + at) = *(const uint4*)(from + at);
        for (int at = (n & ~15) + lane; at < n; at += WARP)
            to[at] = from[at];
        return;
    }
    const int head = (int)((size_t)to & 3);
    const u32* words = (const u32*)from;
    for (int at = lane * 4 - head; at < n; at += WARP * 4) {
        if (at >= 0 && at + 4 <= n) {
            *(u32*)(to + at) = __funnelshift_r(words[at >> 2], words[(at >> 2) + 1], (at & 3) * 8);
        } else {
            for (int b = max(at, 0); b < min(at + 4, n); b++)
                to[b] = from[b];
        }
    }
}

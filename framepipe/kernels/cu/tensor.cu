// Planes or pictures to tensors of the same size: see rows.cuh. A warp makes codes of 256 pixels of one or two rows in
// shared memory, from where each of its accesses stores 512 bytes of a row without a gap.

// A code as a float, from byte `at` of a word: 2**23 + code is exact, and its bits are the code's beside an exponent.
__device__ __forceinline__ float code_at(u32 word, int at)
{
    return __fadd_rn(__uint_as_float(__byte_perm(word, 0x4b000000, 0x7440 + at)), -8388608.0f);
}

// What is multiplied and added, of three channels in the order of their turn.
struct Turns {
    float factor[3], offset[3];
};

__device__ __forceinline__ Turns turns_from(const Target& t, int first)
{
    Turns to;
    for (int c = 0; c < 3; c++) {
        const int at = first + c - (first + c >= 3 ? 3 : 0);
        to.factor[c] = at == 0 ? t.factor[0] : at == 1 ? t.factor[1] : t.factor[2];
        to.offset[c] = at == 0 ? t.offset[0] : at == 1 ? t.offset[1] : t.offset[2];
    }
    return to;
}

// The value of byte `at`, where `turn` is the channel's turn; CHANNELS is 1 for a run of the first of them alone.
template <int CHANNELS>
__device__ __forceinline__ float value_at(u32 word, int at, const Turns& turns, int turn)
{
    const int c = CHANNELS == 1 ? 0 : turn % 3;
    return __fadd_rn(__fmul_rn(code_at(word, at), turns.factor[c]), turns.offset[c]);  // never fused
}

__device__ __forceinline__ u32 half_bits(float low, float high)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    u16 first, second;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(first) : "f"(low));
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(second) : "f"(high));
    return first | (u32)second << 16;
#endif
}

template <int CHANNELS>
__device__ __forceinline__ void store_value(u8* to, const u8* codes, int i, const Target& t, int channel)
{
    const float value = value_at<CHANNELS>(codes[i], 0, turns_from(t, CHANNELS == 1 ? channel : i % 3), 0);
    if (t.kind == FLOAT32)
        *(float*)(to + 4 * i) = value;
    else if (t.kind == FLOAT16)
        *(u16*)(to + 2 * i) = (u16)half_bits(value, 0);
    else
        to[i] = codes[i];
}

// One warp stores the values of n codes (of CHANNELS times 256 at most) from shared memory, 16 bytes a lane at a time
// where the row is aligned to as many. A run begins with `channel` or, where channels take turns, with the first.
template <int CHANNELS>
__device__ __forceinline__ void store_values(u8* to, const u8* codes, int n, const Target& t, int channel, int lane)
{
    int wide = 0;  // so many are stored in groups
    if (t.kind == UINT8) {
        store_row<true>(to, codes, n, lane);
        return;
    }
    if (((size_t)to & 15) == 0 && t.kind == FLOAT32) {
        Turns turns = turns_from(t, CHANNELS == 1 ? channel : lane % 3);  // 4 * lane has the same remainder
#pragma unroll
        for (int pass = 0; pass < 2 * CHANNELS; pass++) {
            const int i = pass * 128 + lane * 4;
            const u32 word = *(const u32*)(codes + i);
            if (i + 4 <= n)
                *(float4*)(to + 4 * i) = make_float4(
                    value_at<CHANNELS>(word, 0, turns, 2 * pass), value_at<CHANNELS>(word, 1, turns, 2 * pass + 1),
                    value_at<CHANNELS>(word, 2, turns, 2 * pass + 2), value_at<CHANNELS>(word, 3, turns, 2 * pass + 3));
        }
        wide = n & ~3;
    } else if (((size_t)to & 15) == 0) {
        Turns turns = turns_from(t, CHANNELS == 1 ? channel : 2 * lane % 3);
#pragma unroll
        for (int pass = 0; pass < CHANNELS; pass++) {
            const int i = pass * 256 + lane * 8;
            const uint2 two = *(const uint2*)(codes + i);
            u32 words[4];
            for (int k = 0; k < 4; k++)
                words[k] = half_bits(
                    value_at<CHANNELS>(k < 2 ? two.x : two.y, 2 * k % 4, turns, pass + 2 * k),
                    value_at<CHANNELS>(k < 2 ? two.x : two.y, 2 * k % 4 + 1, turns, pass + 2 * k + 1));
            if (i + 8 <= n)
                *(uint4*)(to + 2 * i) = make_uint4(words[0], words[1], words[2], words[3]);
        }
        wide = n & ~7;
    }
    for (int i = wide + lane; i < n; i += WARP)
        store_value<CHANNELS>(to, codes, i, t, channel);
}

// Eight pixels of a row in shared memory: 24 bytes of each lane side by side, or 8 of each in a row a channel.
template <bool PLANAR>
__device__ __forceinline__ void keep(
    const Source& s, const Loaded& loaded, const Chroma& chroma, int row, u8* memory, int lane)
{
    if (PLANAR) {
        u32 words[3][2];
        planar(s, loaded, chroma, row, words);
        for (int c = 0; c < 3; c++)
            *(uint2*)(memory + c * 256 + lane * 8) = make_uint2(words[c][0], words[c][1]);
    } else {
        u32 words[6];
        interleaved(s, loaded, chroma, row, words);
        for (int k = 0; k < 3; k++)
            *(uint2*)(memory + lane * 24 + k * 8) = make_uint2(words[2 * k], words[2 * k + 1]);
    }
}

template <bool PLANAR>
__device__ __forceinline__ void tensor(const u8* in, u8* out, const Source& s, const Target& t)
{
    const int PITCH = 256 * 3 + 16;
    __shared__ uint4 shared[8][ROWS * PITCH / 16];
    u8* memory = (u8*)shared[threadIdx.y];
    const int lane = threadIdx.x, x0 = blockIdx.x * 256, x = x0 + lane * 8, n = min(256, s.width - x0);
    in += blockIdx.z * s.picture;
    out += blockIdx.z * t.picture + (i64)x0 * t.column;
    for (int y = (blockIdx.y * 8 + threadIdx.y) * ROWS; y < s.height; y += gridDim.y * 8 * ROWS) {
        if (x < s.width) {
            Loaded loaded;
            Cursor(in, s, x, y).load(s, true, y + 1 < s.height, loaded);
            const Chroma chroma = chroma_of(s, loaded);
            for (int r = 0; r < ROWS; r++)
                keep<PLANAR>(s, loaded, chroma, r, memory + r * PITCH, lane);
        }
        __syncwarp();
        for (int r = 0; r < ROWS && y + r < s.height; r++) {
            u8* to = out + (y + r) * t.row;
            for (int c = 0; c < 3 && PLANAR; c++)
                store_values<1>(
                    to + c * t.channel, memory + r * PITCH + (t.swap ? 2 - c : c) * 256, n, t, c, lane);
            if (!PLANAR)
                store_values<3>(to, memory + r * PITCH, n * 3, t, 0, lane);
        }
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(256) tensor_planar(const u8* in, u8* out, Job job)
{
    tensor<true>(in, out, job.source, job.target);
}

extern "C" __global__ void __launch_bounds__(256) tensor_interleaved(const u8* in, u8* out, Job job)
{
    tensor<false>(in, out, job.source, job.target);
}

// Planes to RGB where it pays to be fast: 4:2:0, 4:2:2 and 4:4:4 with repeated chroma, planes aligned to 16 bytes.
// A thread makes 8 pixels of one row or, where rows share their chroma, of two, in shared memory, from where they are
// stored in rows. Compiled for each SAMPLE (u8 or u16), CHROMA_W_SHIFT and CHROMA_H_SHIFT.

const int PAIRS = 8 >> CHROMA_W_SHIFT, ROWS = 1 << CHROMA_H_SHIFT;
const int LUMA_WORDS = 2 * sizeof(SAMPLE), CHROMA_WORDS = PAIRS * sizeof(SAMPLE) / 4;

template <int WORDS>
__device__ __forceinline__ void load(const u8* from, u32 (&words)[WORDS])
{
    if (WORDS % 4 == 0) {
        for (int i = 0; i < WORDS / 4; i++) {
            const uint4 four = __ldg((const uint4*)from + i);
            words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
        }
    } else if (WORDS == 2) {
        const uint2 two = __ldg((const uint2*)from);
        words[0] = two.x, words[WORDS - 1] = two.y;
    } else {
        words[0] = __ldg((const u32*)from);
    }
}

// Sample i of packed ones.
template <int WORDS>
__device__ __forceinline__ int unpacked(const u32 (&words)[WORDS], int i)
{
    if (sizeof(SAMPLE) == 1)
        return __byte_perm(words[i / 4], 0, 0x4440 + i % 4);
    return __byte_perm(words[i / 2], 0, i % 2 ? 0x4432 : 0x4410);
}

// Every other sample of packed ones, from the first on or from the second on.
__device__ __forceinline__ void split(
    const u32 (&both)[2 * CHROMA_WORDS], u32 (&first)[CHROMA_WORDS], u32 (&second)[CHROMA_WORDS])
{
    for (int i = 0; i < CHROMA_WORDS; i++) {
        first[i] = __byte_perm(both[2 * i], both[2 * i + 1], sizeof(SAMPLE) == 1 ? 0x6420 : 0x5410);
        second[i] = __byte_perm(both[2 * i], both[2 * i + 1], sizeof(SAMPLE) == 1 ? 0x7531 : 0x7632);
    }
}

// Four numbers as four codes in a word, each clipped to 0 to 255; the first is the lowest byte.
__device__ __forceinline__ u32 packed(int a, int b, int c, int d)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 720
    u32 high, word;
    asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(high) : "r"(d), "r"(c), "r"(0));
    asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(b), "r"(a), "r"(high));
    return word;
#else
    return clip(a, 0, 255) | clip(b, 0, 255) << 8 | clip(c, 0, 255) << 16 | (u32)clip(d, 0, 255) << 24;
#endif
}

// The chroma of 8 pixels from (x, y) on of the lying picture: what it adds to each of the three codes.
__device__ __forceinline__ void load_chroma(const u8* in, const Source& s, int x, int y, int (&sums)[PAIRS][3])
{
    u32 us[CHROMA_WORDS], vs[CHROMA_WORDS];
    const u8* at = in + (i64)(y >> CHROMA_H_SHIFT) * s.chroma_pitch + (x >> CHROMA_W_SHIFT) * s.chroma_step;
    if (s.chroma_step == sizeof(SAMPLE)) {
        load(at + s.origin[1], us);
        load(at + s.origin[2], vs);
    } else {  // U and V by turns
        u32 both[2 * CHROMA_WORDS];
        const bool swapped = s.origin[2] < s.origin[1];
        load(at + (swapped ? s.origin[2] : s.origin[1]), both);
        if (swapped)
            split(both, vs, us);
        else
            split(both, us, vs);
    }
    for (int p = 0; p < PAIRS; p++)
        chroma(s, unpacked(us, p), unpacked(vs, p), sums[p]);
}

// 8 pixels of a row as 24 bytes.
__device__ __forceinline__ void convert_row(
    const Source& s, const u32 (&luma)[LUMA_WORDS], const int (&sums)[PAIRS][3], u32 (&words)[6])
{
    int codes[24];
    for (int k = 0; k < 8; k++)
        for (int c = 0; c < 3; c++)
            codes[3 * k + c] = (int)(s.y * unpacked(luma, k) + sums[k >> CHROMA_W_SHIFT][c]) >> s.shift;
    for (int k = 0; k < 6; k++)
        words[k] = packed(codes[4 * k], codes[4 * k + 1], codes[4 * k + 2], codes[4 * k + 3]);
}

// The upright picture is the lying one: a warp makes 256 pixels of one or two rows, and goes on downwards.
extern "C" __global__ void __launch_bounds__(256) convert(const u8* in, u8* out, Job job)
{
    const int PITCH = 256 * 3 + 16;
    __shared__ uint4 shared[8][ROWS * PITCH / 16 + 1];
    const Source& s = job.source;
    const Target& t = job.target;
    u8* memory = (u8*)shared[threadIdx.y];
    const int lane = threadIdx.x, x0 = blockIdx.x * 256, x = x0 + lane * 8, nbytes = min(256, s.width - x0) * 3;
    in += blockIdx.z * s.picture;
    out += blockIdx.z * t.picture + x0 * 3;
    for (int y = (blockIdx.y * 8 + threadIdx.y) * ROWS; y < s.height; y += gridDim.y * 8 * ROWS) {
        if (x < s.width) {
            u32 luma[ROWS][LUMA_WORDS], words[6];
            int sums[PAIRS][3];
            const u8* at = in + s.luma + (i64)y * s.luma_pitch + x * (int)sizeof(SAMPLE);
            for (int r = 0; r < ROWS; r++)
                load(at + (y + r < s.height ? r * s.luma_pitch : 0), luma[r]);
            load_chroma(in, s, x, y, sums);
            for (int r = 0; r < ROWS; r++) {
                convert_row(s, luma[r], sums, words);
                uint2* to = (uint2*)(memory + r * PITCH + lane * 24);
                for (int k = 0; k < 3; k++)
                    to[k] = make_uint2(words[2 * k], words[2 * k + 1]);
            }
        }
        __syncwarp();
        for (int r = 0; r < ROWS; r++)
            if (y + r < s.height)
                store_row<true>(out + (y + r) * t.row, memory + r * PITCH, nbytes, lane);
        __syncwarp();
    }
}

// Where the pixels of a tile of the lying picture stand in shared memory, and where the tile goes in the upright one.
struct Tile {
    int width, height;         // of the upright tile, in pixels
    int x, y;                  // of its first pixel in the upright picture
    int pitch;                 // of its rows in shared memory
    int first, across, down;   // of the lying tile's first pixel, and steps to the right and downwards
};

__device__ __forceinline__ Tile tile_at(const Source& s, int x0, int y0, int width, int height)
{
    const int w = min(width, s.width - x0), h = min(height, s.height - y0);
    const int after_x = s.width - x0 - w, after_y = s.height - y0 - h;
    const int flat = width * 3 + 4, tall = height * 3 + 4;  // a word beside a multiple of the 32 banks
    switch (s.rotation) {
    case 90: return {h, w, y0, after_x, tall, (w - 1) * tall, -tall, 3};
    case 180: return {w, h, after_x, after_y, flat, (h - 1) * flat + (w - 1) * 3, -3, -flat};
    default: return {h, w, after_y, x0, tall, (h - 1) * 3, tall, -3};
    }
}

// The upright picture is the lying one turned: a block of 8 x 32 threads turns a tile of 64 columns in shared memory.
extern "C" __global__ void __launch_bounds__(256) convert_turned(const u8* in, u8* out, Job job)
{
    __shared__ uint4 shared[64 * (32 * ROWS * 3 + 4) / 16 + 1];
    const Source& s = job.source;
    const Target& t = job.target;
    u8* memory = (u8*)shared;
    in += blockIdx.z * s.picture;
    out += blockIdx.z * t.picture;
    const int x0 = blockIdx.x * 64, y0 = blockIdx.y * 32 * ROWS, i = threadIdx.x * 8, j = threadIdx.y * ROWS;
    const int x = x0 + i, y = y0 + j;
    const Tile tile = tile_at(s, x0, y0, 64, 32 * ROWS);
    if (x < s.width && y < s.height) {
        int sums[PAIRS][3];
        load_chroma(in, s, x, y, sums);
        for (int r = 0; r < ROWS && y + r < s.height; r++) {
            u32 luma[LUMA_WORDS], words[6];
            load(in + s.luma + (i64)(y + r) * s.luma_pitch + x * (int)sizeof(SAMPLE), luma);
            convert_row(s, luma, sums, words);
            u8* to = memory + tile.first + i * tile.across + (j + r) * tile.down;
            for (int k = 0; k < 8; k++, to += tile.across)
                if (x + k < s.width)
                    for (int c = 0; c < 3; c++)
                        to[c] = (u8)(words[(3 * k + c) / 4] >> (3 * k + c) % 4 * 8);
        }
    }
    __syncthreads();
    const int thread = threadIdx.y * 8 + threadIdx.x;
    out += tile.y * t.row + tile.x * 3;
    for (int r = thread / WARP; r < tile.height; r += 8)
        store_row<false>(out + r * t.row, memory + r * tile.pitch, tile.width * 3, thread % WARP);
}

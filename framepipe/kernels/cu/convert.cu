// Planes to RGB where it pays to be fast: 4:2:0, 4:2:2 and 4:4:4 with repeated chroma, planes aligned to 16 bytes.
// A thread makes 8 pixels of one row or, where rows share their chroma, of two. A block makes a tile, turns it upright
// in shared memory and stores it in rows: 32 threads wide, or 8 where rows become columns. Compiled for each SAMPLE (u8
// or u16), CHROMA_W_SHIFT and CHROMA_H_SHIFT.

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
template <class T, int WORDS>
__device__ __forceinline__ int unpacked(const u32 (&words)[WORDS], int i)
{
    const int per_word = 4 / sizeof(T);
    return (T)(words[i / per_word] >> (i % per_word * 8 * sizeof(T)));
}

// Every other sample of packed ones, from the first on or from the second on.
template <class T, int WORDS>
__device__ __forceinline__ void split(const u32 (&both)[2 * WORDS], u32 (&first)[WORDS], u32 (&second)[WORDS])
{
    for (int i = 0; i < WORDS; i++) {
        first[i] = __byte_perm(both[2 * i], both[2 * i + 1], sizeof(T) == 1 ? 0x6420 : 0x5410);
        second[i] = __byte_perm(both[2 * i], both[2 * i + 1], sizeof(T) == 1 ? 0x7531 : 0x7632);
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
    // Pitches: aligned for 16 bytes at a time, or one word beside a multiple of the 32 banks.
    const int straight = width * 3 + 16, turned = height * 3 + 4;
    switch (s.rotation) {
    case 90: return {h, w, y0, after_x, turned, (w - 1) * turned, -turned, 3};
    case 180: return {w, h, after_x, after_y, straight, (h - 1) * straight + (w - 1) * 3, -3, -straight};
    case 270: return {h, w, after_y, x0, turned, (h - 1) * 3, turned, -3};
    default: return {w, h, x0, y0, straight, 0, 3, straight};
    }
}

template <class T, int W_SHIFT, int H_SHIFT>
__device__ __forceinline__ void make_tile(const u8* in, u8* out, const Source& s, const Target& t)
{
    const int PAIRS = 8 >> W_SHIFT, ROWS = 1 << H_SHIFT;
    const int LUMA = 2 * sizeof(T), CHROMA = PAIRS * sizeof(T) / 4;  // words
    // 64 turned rows of 32 * ROWS pixels; 8 * ROWS straight ones of 256 take less.
    __shared__ uint4 shared[64 * (32 * ROWS * 3 + 4) / 16 + 1];
    u8* memory = (u8*)shared;

    in += blockIdx.z * s.picture;
    out += blockIdx.z * t.picture;
    const int width = blockDim.x * 8, height = blockDim.y * ROWS;
    const int x0 = blockIdx.x * width, y0 = blockIdx.y * height;
    const int i = threadIdx.x * 8, j = threadIdx.y * ROWS, x = x0 + i, y = y0 + j;
    const Tile tile = tile_at(s, x0, y0, width, height);

    if (x < s.width && y < s.height) {
        u32 us[CHROMA], vs[CHROMA];
        const u8* first = in + (i64)(y >> H_SHIFT) * s.chroma_pitch + (x >> W_SHIFT) * s.chroma_step;
        if (s.chroma_step == sizeof(T)) {
            load(first + s.origin[1], us);
            load(first + s.origin[2], vs);
        } else {  // U and V by turns
            u32 both[2 * CHROMA];
            const bool swapped = s.origin[2] < s.origin[1];
            load(first + (swapped ? s.origin[2] : s.origin[1]), both);
            if (swapped)
                split<T>(both, vs, us);
            else
                split<T>(both, us, vs);
        }
        u32 lumas[ROWS][LUMA];
        for (int r = 0; r < ROWS; r++)
            if (r == 0 || y + r < s.height)
                load(in + s.luma + (i64)(y + r) * s.luma_pitch + x * (int)sizeof(T), lumas[r]);
        int sums[PAIRS][3];
        for (int p = 0; p < PAIRS; p++)
            chroma(s, unpacked<T>(us, p), unpacked<T>(vs, p), sums[p]);
        for (int r = 0; r < ROWS; r++) {
            if (r > 0 && y + r >= s.height)
                break;
            u32 words[6];
            int codes[24];
            for (int k = 0; k < 8; k++)
                for (int c = 0; c < 3; c++)
                    codes[3 * k + c] = (int)(s.y * unpacked<T>(lumas[r], k) + sums[k >> W_SHIFT][c]) >> s.shift;
            for (int k = 0; k < 6; k++)
                words[k] = packed(codes[4 * k], codes[4 * k + 1], codes[4 * k + 2], codes[4 * k + 3]);
            u8* to = memory + tile.first + i * tile.across + (j + r) * tile.down;
            if (s.rotation == 0) {
                for (int k = 0; k < 3; k++)
                    ((uint2*)to)[k] = make_uint2(words[2 * k], words[2 * k + 1]);
            } else {
                for (int k = 0; k < 8; k++, to += tile.across)
                    if (x + k < s.width)
                        for (int c = 0; c < 3; c++)
                            to[c] = (u8)(words[(3 * k + c) / 4] >> (3 * k + c) % 4 * 8);
            }
        }
    }
    __syncthreads();
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    out += tile.y * t.row + tile.x * 3;
    for (int r = thread / WARP; r < tile.height; r += blockDim.x * blockDim.y / WARP)
        store_row(out + r * t.row, memory + r * tile.pitch, tile.width * 3, thread % WARP);
}

extern "C" __global__ void __launch_bounds__(256) convert(const u8* in, u8* out, Job job)
{
    make_tile<SAMPLE, CHROMA_W_SHIFT, CHROMA_H_SHIFT>(in, out, job.source, job.target);
}

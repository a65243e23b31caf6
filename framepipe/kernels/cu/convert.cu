// Planes to RGB where it pays to be fast: see rows.cuh. A thread makes 8 pixels of one row or, where rows share their
// chroma, of two, in shared memory, from where they are stored in rows.

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
            u32 words[6];
            Loaded loaded;
            Cursor(in, s, x, y).load(s, true, y + 1 < s.height, loaded);
            const Chroma chroma = chroma_of(s, loaded);
            for (int r = 0; r < ROWS; r++) {
                interleaved(s, loaded, chroma, r, words);
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
    const int flat = width * 3 + 4, tall = height * 3 + 4;  // a word beside a multiple of the 32 banks
    const bool swaps = s.turn[0] == 0;
    // Along x, and along y, of the lying picture the upright one is run through forwards (1) or backwards (-1).
    const int along_x = s.turn[swaps ? 1 : 0], along_y = s.turn[swaps ? 3 : 4];
    const int from_x = along_x > 0 ? x0 : s.width - x0 - w, from_y = along_y > 0 ? y0 : s.height - y0 - h;
    const int across = along_x * (swaps ? tall : 3), down = along_y * (swaps ? 3 : flat);
    const int first = (along_x > 0 ? 0 : (1 - w) * across) + (along_y > 0 ? 0 : (1 - h) * down);
    if (swaps)
        return {h, w, from_y, from_x, tall, first, across, down};
    return {w, h, from_x, from_y, flat, first, across, down};
}

// The upright picture is the lying one turned or mirrored: a block of 8 x 32 threads turns a tile of 64 columns in
// shared memory.
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
        Loaded loaded;
        Cursor(in, s, x, y).load(s, true, y + 1 < s.height, loaded);
        const Chroma chroma = chroma_of(s, loaded);
        for (int r = 0; r < ROWS && y + r < s.height; r++) {
            u32 words[6];
            interleaved(s, loaded, chroma, r, words);
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

// Pictures and planes to pictures and tensors: colour, crop, resampling, border, normalising and layout in one launch.
// Compiled for each READER.

__device__ __forceinline__ Three bilinear(const Source& s, const u8* in, const Place& p, Tap h, Tap v)
{
    Three samples[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int x = p.source[0] + clip(h.first + k % 2, 0, p.source[2] - 1);
        const int y = p.source[1] + clip(v.first + k / 2, 0, p.source[3] - 1);
        samples[k] = READER::load(s, in, x, y);
    }
    Three sum = {1 << 21, 1 << 21, 1 << 21};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int share = (k / 2 ? v.part : 2048 - v.part) * (k % 2 ? h.part : 2048 - h.part);
        const Three rgb = READER::codes(s, samples[k]);
        for (int c = 0; c < 3; c++)
            sum.values[c] += share * rgb.values[c];
    }
    for (int c = 0; c < 3; c++)
        sum.values[c] >>= 22;
    return sum;
}

// Adds `share` times the weighted sum of a row's pixels `from`, from + by, ... GROUP are loaded at a time whatever the
// count, the last of them with no weight: loads that wait for each other would take longer than all arithmetic.
template <int GROUP>
__device__ __forceinline__ void add_row(
    const Source& s, const u8* in, const Place& p, const Tap& h, int y, u32 share, int from, int count, int by,
    u64 (&sum)[3])
{
    u32 row[3] = {0, 0, 0};
    for (int i = from; i < count; i += GROUP * by) {
        Three samples[GROUP];
#pragma unroll
        for (int k = 0; k < GROUP; k++)
            samples[k] = READER::load(s, in, p.source[0] + h.first + min(i + k * by, count - 1), y);
#pragma unroll
        for (int k = 0; k < GROUP; k++) {
            const u32 w = weight(p, 0, h, i + k * by);
            const Three rgb = READER::codes(s, samples[k]);
            for (int c = 0; c < 3; c++)
                row[c] += w * rgb.values[c];
        }
    }
    for (int c = 0; c < 3; c++)
        sum[c] += (u64)row[c] * share;
}

// Adds what one thread takes of an output pixel: rows `row`, row + rows, ... and of these columns `column`, ...
template <int GROUP>
__device__ __forceinline__ void add_rows(
    const Source& s, const u8* in, const Place& p, Tap h, Tap v, int row, int rows, int column, int columns,
    u64 (&sum)[3])
{
    const int across = touched(p, 0, h), down = touched(p, 1, v);
    for (int j = row; j < down; j += rows)
        add_row<GROUP>(s, in, p, h, p.source[1] + v.first + j, weight(p, 1, v, j), column, across, columns, sum);
}

// The sum over the lanes of each team of a warp, in all of them.
__device__ __forceinline__ void together(u64 (&sum)[3], int team)
{
    for (int apart = team / 2; apart; apart /= 2)
        for (int c = 0; c < 3; c++)
            sum[c] += __shfl_xor_sync(ALL_LANES, sum[c], apart);
}

// A warp makes p.count times 32 pixels of a row, lane beside lane; by AREA a team of lanes may share a pixel's rows.
// Where the channels of a pixel stand together they go through shared memory, so that rows are stored in one piece.
template <Method METHOD>
__device__ __forceinline__ void picture(const u8* in, u8* out, const Source& s, const Target& t, const Place& p)
{
    __shared__ uint4 shared[8][(4 * WARP * 12 + 16) / 16];
    const int team = METHOD == AREA ? p.team : 1, across = WARP / team;
    const int lane = threadIdx.x, y = blockIdx.y * 8 + threadIdx.y, x0 = blockIdx.x * across * p.count;
    if (y >= t.height)
        return;
    u8* row = (u8*)shared[threadIdx.y];
    in += blockIdx.z * s.picture;
    out += blockIdx.z * t.picture + y * t.row + (i64)x0 * t.column;
    const Tap v = tap<METHOD>(p, 1, max(y - p.target[1], 0));
    for (int pass = 0; pass < p.count; pass++) {
        const int k = pass * across + lane / team, x = x0 + k;
        const bool inside = x < t.width && !is_border(p, x, y);
        Three rgb = {p.color[0], p.color[1], p.color[2]};
        u64 sum[3] = {0, 0, 0};
        if (inside) {
            const Tap h = tap<METHOD>(p, 0, x - p.target[0]);
            if (METHOD == AREA && p.group == 3)
                add_rows<3>(s, in, p, h, v, lane % team, team, 0, 1, sum);
            else if (METHOD == AREA)
                add_rows<4>(s, in, p, h, v, lane % team, team, 0, 1, sum);
            else if (METHOD == BILINEAR)
                rgb = bilinear(s, in, p, h, v);
            else
                rgb = READER::codes(s, READER::load(s, in, p.source[0] + h.first, p.source[1] + v.first));
        }
        if (METHOD == AREA) {
            together(sum, team);
            for (int c = 0; c < 3; c++)
                rgb.values[c] = inside ? average(p, sum[c]) : rgb.values[c];
        }
        if (x < t.width && lane % team == 0)
            put_pixel((t.together ? row : out) + (i64)k * t.column, t, rgb);
    }
    if (t.together) {
        __syncwarp();
        store_row<true>(out, row, min(across * p.count, t.width - x0) * t.column, lane);
    }
}

// The same by AREA where a pixel is made of very many: a block makes one pixel.
__device__ __forceinline__ void gather(const u8* in, u8* out, const Source& s, const Target& t, const Place& p)
{
    __shared__ u64 sums[8][3];
    const int x = blockIdx.x, y = blockIdx.y;
    in += blockIdx.z * s.picture;
    Three rgb = {p.color[0], p.color[1], p.color[2]};
    if (!is_border(p, x, y)) {
        const Tap h = tap<AREA>(p, 0, x - p.target[0]), v = tap<AREA>(p, 1, y - p.target[1]);
        u64 sum[3] = {0, 0, 0};
        add_rows<4>(s, in, p, h, v, threadIdx.y, 8, threadIdx.x, WARP, sum);
        together(sum, WARP);
        for (int c = 0; c < 3; c++)
            if (threadIdx.x == 0)
                sums[threadIdx.y][c] = sum[c];
        __syncthreads();
        for (int c = 0; c < 3; c++) {
            u64 all = 0;
            for (int k = 0; k < 8; k++)
                all += sums[k][c];
            rgb.values[c] = average(p, all);
        }
    }
    if (threadIdx.x == 0 && threadIdx.y == 0)
        put_pixel(out + blockIdx.z * t.picture + y * t.row + (i64)x * t.column, t, rgb);
}

// BLOCKS is how many a multiprocessor has room for: many where loads are waited for one pixel at a time, and few, with
// more registers, where the compiler would otherwise wait for each load before the next.
#define KERNEL(NAME, BLOCKS, BODY)                                                                        \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) NAME(const u8* in, u8* out, Job job)        \
    {                                                                                                     \
        BODY(in, out, job.source, job.target, job.place);                                                 \
    }

KERNEL(picture_copy, 8, picture<COPY>)
#ifndef ONLY_COPY
KERNEL(picture_nearest, 8, picture<NEAREST>)
KERNEL(picture_bilinear, 6, picture<BILINEAR>)
KERNEL(picture_area, 4, picture<AREA>)
KERNEL(gather_area, 4, gather)
#endif

// Pictures and planes to pictures and tensors: colour, crop, resampling, border, normalising and layout in one launch.
// The taps of framepipe/kernels/_resample.py are computed here, so no table has to be kept on the device. Compiled for
// each READER.

enum Method { COPY, NEAREST, BILINEAR, AREA };
enum Kind { UINT8, FLOAT16, FLOAT32 };

// Where an output position's taps begin. `part` is BILINEAR's weight of the second position, and for AREA how much of
// the first source pixel lies before the interval, in units.
struct Tap {
    int first;
    u32 part;
};

template <Method METHOD>
__device__ __forceinline__ Tap tap(const Place& p, int axis, int d)
{
    const u64 n = p.source[2 + axis], m = p.target[2 + axis], magic = p.magic[axis];
    if (METHOD == NEAREST)
        return {(int)divided((2 * (u64)d + 1) * n, 2 * m, magic), 0};
    if (METHOD == BILINEAR) {
        const u64 centre = (2 * (u64)d + 1) * n + m;  // 2 * m more than the definition's, which may be below 0
        const int low = (int)divided(centre, 2 * m, magic);
        const u32 right = (u32)divided((centre - low * 2 * m) * 2048 + m, 2 * m, magic);
        return {low - 1, right};
    }
    if (METHOD == AREA) {
        const u64 begin = d * (u64)p.step[axis];
        const int first = (int)divided(begin, p.pixel[axis], magic);
        return {first, (u32)begin - first * p.pixel[axis]};
    }
    return {d, 0};
}

// How many source pixels an interval of AREA touches, and the weight of the k-th.
__device__ __forceinline__ int touched(const Place& p, int axis, const Tap& tap)
{
    return (int)divided(tap.part + p.step[axis] + p.pixel[axis] - 1, p.pixel[axis], p.magic[axis]);
}

__device__ __forceinline__ u32 weight(const Place& p, int axis, const Tap& tap, u32 k)
{
    const u32 pixel = p.pixel[axis];
    return min((k + 1) * pixel, tap.part + p.step[axis]) - max(k * pixel, tap.part);
}

__device__ __forceinline__ int average(const Place& p, u64 sum)
{
    return (int)divided(sum + p.total / 2, p.total, p.total_magic);
}

__device__ __forceinline__ void bilinear(const Source& s, const u8* in, const Place& p, Tap h, Tap v, int (&rgb)[3])
{
    int sum[3] = {1 << 21, 1 << 21, 1 << 21};
    for (int j = 0; j < 2; j++) {
        const int y = p.source[1] + clip(v.first + j, 0, p.source[3] - 1);
        for (int i = 0; i < 2; i++) {
            const int x = p.source[0] + clip(h.first + i, 0, p.source[2] - 1);
            const int share = (j ? v.part : 2048 - v.part) * (i ? h.part : 2048 - h.part);
            int one[3];
            READER::read(s, in, x, y, one);
            for (int c = 0; c < 3; c++)
                sum[c] += share * one[c];
        }
    }
    for (int c = 0; c < 3; c++)
        rgb[c] = sum[c] >> 22;
}

// Adds `share` times the weighted sum of a row's pixels `from`, from + by, ... Four are loaded at a time whatever the
// count, the last of them with no weight: loads that wait for each other would take longer than all arithmetic.
__device__ __forceinline__ void add_row(
    const Source& s, const u8* in, const Place& p, const Tap& h, int y, u32 share, int from, int count, int by,
    u64 (&sum)[3])
{
    u32 row[3] = {0, 0, 0};
    for (int i = from; i < count; i += 4 * by) {
        int four[4][3];
#pragma unroll
        for (int k = 0; k < 4; k++)
            READER::read(s, in, p.source[0] + h.first + min(i + k * by, count - 1), y, four[k]);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const u32 w = i + k * by < count ? weight(p, 0, h, i + k * by) : 0;
            for (int c = 0; c < 3; c++)
                row[c] += w * four[k][c];
        }
    }
    for (int c = 0; c < 3; c++)
        sum[c] += (u64)row[c] * share;
}

// Sums of rows `from`, from + by, ... of the pixels of which this thread takes one in `team`, from `member` on.
__device__ __forceinline__ void add_rows(
    const Source& s, const u8* in, const Place& p, Tap h, Tap v, int from, int by, int member, int team, u64 (&sum)[3])
{
    const int across = touched(p, 0, h), down = touched(p, 1, v);
    for (int j = from; j < down; j += by)
        add_row(s, in, p, h, p.source[1] + v.first + j, weight(p, 1, v, j), member, across, team, sum);
}

// The sum over the lanes of each team of a warp, in all of them.
__device__ __forceinline__ void together(u64 (&sum)[3], int team)
{
    for (int apart = team / 2; apart; apart /= 2)
        for (int c = 0; c < 3; c++)
            sum[c] += __shfl_xor_sync(ALL_LANES, sum[c], apart);
}

__device__ __forceinline__ void put_pixel(u8* to, const Target& t, const int (&rgb)[3])
{
    const int codes[3] = {t.swap ? rgb[2] : rgb[0], rgb[1], t.swap ? rgb[0] : rgb[2]};
    if (t.kind == UINT8) {
        for (int c = 0; c < 3; c++)
            to[c * t.channel] = (u8)codes[c];
        return;
    }
    float values[3];
    for (int c = 0; c < 3; c++)
        values[c] = __fadd_rn(__fmul_rn((float)codes[c], t.factor[c]), t.offset[c]);  // never fused
    if (t.kind == FLOAT32) {
        for (int c = 0; c < 3; c++)
            *(float*)(to + c * t.channel) = values[c];
        return;
    }
    for (int c = 0; c < 3; c++) {
        u16 bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(values[c]));
        *(u16*)(to + c * t.channel) = bits;
    }
}

__device__ __forceinline__ bool is_border(const Place& p, int x, int y)
{
    return x < p.target[0] || y < p.target[1] || x >= p.target[0] + p.target[2] || y >= p.target[1] + p.target[3];
}

// A warp makes p.count times 32 pixels of a row, lane beside lane; by AREA a pixel may take a team of lanes. Where the
// channels of a pixel stand together they go through shared memory, so that rows are stored in one piece.
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
        int rgb[3] = {p.color[0], p.color[1], p.color[2]};
        u64 sum[3] = {0, 0, 0};
        if (inside) {
            const Tap h = tap<METHOD>(p, 0, x - p.target[0]);
            if (METHOD == AREA)
                add_rows(s, in, p, h, v, 0, 1, lane % team, team, sum);
            else if (METHOD == BILINEAR)
                bilinear(s, in, p, h, v, rgb);
            else
                READER::read(s, in, p.source[0] + h.first, p.source[1] + v.first, rgb);
        }
        if (METHOD == AREA) {
            together(sum, team);
            for (int c = 0; c < 3; c++)
                rgb[c] = inside ? average(p, sum[c]) : rgb[c];
        }
        if (x < t.width && lane % team == 0)
            put_pixel((t.together ? row : out) + (i64)k * t.column, t, rgb);
    }
    if (t.together) {
        __syncwarp();
        store_row(out, row, min(across * p.count, t.width - x0) * t.column, lane);
    }
}

// The same by AREA where a pixel is made of very many: a block makes one pixel.
__device__ __forceinline__ void gather(const u8* in, u8* out, const Source& s, const Target& t, const Place& p)
{
    __shared__ u64 sums[8][3];
    const int x = blockIdx.x, y = blockIdx.y;
    in += blockIdx.z * s.picture;
    int rgb[3] = {p.color[0], p.color[1], p.color[2]};
    if (!is_border(p, x, y)) {
        const Tap h = tap<AREA>(p, 0, x - p.target[0]), v = tap<AREA>(p, 1, y - p.target[1]);
        u64 sum[3] = {0, 0, 0};
        add_rows(s, in, p, h, v, threadIdx.y, 8, threadIdx.x, WARP, sum);
        together(sum, WARP);
        for (int c = 0; c < 3; c++)
            if (threadIdx.x == 0)
                sums[threadIdx.y][c] = sum[c];
        __syncthreads();
        for (int c = 0; c < 3; c++) {
            u64 all = 0;
            for (int k = 0; k < 8; k++)
                all += sums[k][c];
            rgb[c] = average(p, all);
        }
    }
    if (threadIdx.x == 0 && threadIdx.y == 0)
        put_pixel(out + blockIdx.z * t.picture + y * t.row + (i64)x * t.column, t, rgb);
}

#define KERNEL(NAME, BODY)                                                                        \
    extern "C" __global__ void __launch_bounds__(256) NAME(const u8* in, u8* out, Job job)        \
    {                                                                                             \
        BODY(in, out, job.source, job.target, job.place);                                         \
    }

KERNEL(picture_copy, picture<COPY>)
#ifndef ONLY_COPY
KERNEL(picture_nearest, picture<NEAREST>)
KERNEL(picture_bilinear, picture<BILINEAR>)
KERNEL(picture_area, picture<AREA>)
KERNEL(gather_area, gather)
#endif

// Pictures and planes to pictures and tensors: colour, crop, resampling, border, normalising and layout in one launch.
// The taps of framepipe/kernels/_resample.py are computed here, so no table has to be kept on the device.

enum Method { COPY, NEAREST, BILINEAR, AREA };
enum Kind { UINT8, FLOAT16, FLOAT32 };

// Where an output position's taps begin. `part` is BILINEAR's weight of the second position, and for AREA how much of
// the first source pixel lies before the interval, in units.
struct Tap {
    int first;
    u32 part;
};

__device__ __forceinline__ Tap tap(const Place& p, int axis, int d)
{
    const u64 n = p.source[2 + axis], m = p.target[2 + axis];
    if (p.method == NEAREST)
        return {(int)divided((2 * (u64)d + 1) * n, 2 * m), 0};
    if (p.method == BILINEAR) {
        const u64 centre = (2 * (u64)d + 1) * n + m;  // 2 * m more than the definition's, which may be below 0
        const int low = (int)divided(centre, 2 * m);
        const u32 right = (u32)divided((centre - low * 2 * m) * 2048 + m, 2 * m);
        return {low - 1, right};
    }
    if (p.method == AREA) {
        const u64 begin = d * (u64)p.step[axis];
        const int first = (int)divided(begin, p.pixel[axis]);
        return {first, (u32)begin - first * p.pixel[axis]};
    }
    return {d, 0};
}

// How many source pixels an interval of AREA touches, and the weight of the k-th.
__device__ __forceinline__ int touched(const Place& p, int axis, const Tap& tap)
{
    return (tap.part + p.step[axis] + p.pixel[axis] - 1) / p.pixel[axis];
}

__device__ __forceinline__ u32 weight(const Place& p, int axis, const Tap& tap, u32 k)
{
    const u32 pixel = p.pixel[axis];
    return min((k + 1) * pixel, tap.part + p.step[axis]) - max(k * pixel, tap.part);
}

__device__ __forceinline__ int average(const Place& p, u64 sum) { return (int)divided(sum + p.total / 2, p.total); }

template <class Reader>
__device__ __forceinline__ void bilinear(const Source& s, const u8* in, const Place& p, Tap h, Tap v, int (&rgb)[3])
{
    int sum[3] = {1 << 21, 1 << 21, 1 << 21};
    for (int j = 0; j < 2; j++) {
        const int y = p.source[1] + clip(v.first + j, 0, p.source[3] - 1);
        for (int i = 0; i < 2; i++) {
            const int x = p.source[0] + clip(h.first + i, 0, p.source[2] - 1);
            const int share = (j ? v.part : 2048 - v.part) * (i ? h.part : 2048 - h.part);
            int one[3];
            Reader::read(s, in, x, y, one);
            for (int c = 0; c < 3; c++)
                sum[c] += share * one[c];
        }
    }
    for (int c = 0; c < 3; c++)
        rgb[c] = sum[c] >> 22;
}

template <class Reader>
__device__ __forceinline__ void add_row(
    const Source& s, const u8* in, const Place& p, const Tap& h, int y, u32 share, int from, int count, int by,
    u64 (&sum)[3])
{
    u32 row[3] = {0, 0, 0};
#pragma unroll 4
    for (int i = from; i < count; i += by) {
        const u32 w = weight(p, 0, h, i);
        int one[3];
        Reader::read(s, in, p.source[0] + h.first + i, y, one);
        for (int c = 0; c < 3; c++)
            row[c] += w * one[c];
    }
    for (int c = 0; c < 3; c++)
        sum[c] += (u64)row[c] * share;
}

template <class Reader>
__device__ __forceinline__ void area(const Source& s, const u8* in, const Place& p, Tap h, Tap v, int (&rgb)[3])
{
    u64 sum[3] = {0, 0, 0};
    const int across = touched(p, 0, h), down = touched(p, 1, v);
    for (int j = 0; j < down; j++)
        add_row<Reader>(s, in, p, h, p.source[1] + v.first + j, weight(p, 1, v, j), 0, across, 1, sum);
    for (int c = 0; c < 3; c++)
        rgb[c] = average(p, sum[c]);
}

__device__ __forceinline__ void put(u8* to, const Target& t, int c, int code)
{
    if (t.kind == UINT8) {
        *to = (u8)code;
        return;
    }
    const float value = __fadd_rn(__fmul_rn((float)code, t.factor[c]), t.offset[c]);  // never fused
    if (t.kind == FLOAT32) {
        *(float*)to = value;
    } else {
        u16 bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        *(u16*)to = bits;
    }
}

__device__ __forceinline__ void put_pixel(u8* to, const Target& t, const int (&rgb)[3])
{
    put(to, t, 0, t.swap ? rgb[2] : rgb[0]);
    put(to + t.channel, t, 1, rgb[1]);
    put(to + 2 * t.channel, t, 2, t.swap ? rgb[0] : rgb[2]);
}

__device__ __forceinline__ bool is_border(const Place& p, int x, int y)
{
    return x < p.target[0] || y < p.target[1] || x >= p.target[0] + p.target[2] || y >= p.target[1] + p.target[3];
}

// A warp makes p.count * 32 pixels of a row, lane beside lane; where the channels of a pixel stand together they go
// through shared memory, so that rows are stored in one piece.
template <class Reader>
__device__ __forceinline__ void picture(const u8* in, u8* out, const Source& s, const Target& t, const Place& p)
{
    __shared__ uint4 shared[8][(4 * WARP * 12 + 16) / 16];
    const int lane = threadIdx.x, y = blockIdx.y * 8 + threadIdx.y, x0 = blockIdx.x * WARP * p.count;
    if (y >= t.height)
        return;
    u8* row = (u8*)shared[threadIdx.y];
    in += blockIdx.z * s.picture;
    out += blockIdx.z * t.picture + y * t.row + (i64)x0 * t.column;
    const Tap v = tap(p, 1, max(y - p.target[1], 0));
    for (int k = lane; k < p.count * WARP && x0 + k < t.width; k += WARP) {
        const int x = x0 + k;
        int rgb[3] = {p.color[0], p.color[1], p.color[2]};
        if (!is_border(p, x, y)) {
            const Tap h = tap(p, 0, x - p.target[0]);
            if (p.method == AREA)
                area<Reader>(s, in, p, h, v, rgb);
            else if (p.method == BILINEAR)
                bilinear<Reader>(s, in, p, h, v, rgb);
            else
                Reader::read(s, in, p.source[0] + h.first, p.source[1] + v.first, rgb);
        }
        put_pixel((t.together ? row : out) + (i64)k * t.column, t, rgb);
    }
    if (t.together) {
        __syncwarp();
        store_row(out, row, min(p.count * WARP, t.width - x0) * t.column, lane);
    }
}

// The same by AREA where a pixel is made of very many: a block makes one pixel.
template <class Reader>
__device__ __forceinline__ void gather(const u8* in, u8* out, const Source& s, const Target& t, const Place& p)
{
    __shared__ u64 sums[8][3];
    const int lane = threadIdx.x, x = blockIdx.x, y = blockIdx.y;
    in += blockIdx.z * s.picture;
    out += blockIdx.z * t.picture + y * t.row + (i64)x * t.column;
    int rgb[3] = {p.color[0], p.color[1], p.color[2]};
    if (!is_border(p, x, y)) {
        const Tap h = tap(p, 0, x - p.target[0]), v = tap(p, 1, y - p.target[1]);
        u64 sum[3] = {0, 0, 0};
        const int across = touched(p, 0, h), down = touched(p, 1, v);
        for (int j = threadIdx.y; j < down; j += 8)
            add_row<Reader>(s, in, p, h, p.source[1] + v.first + j, weight(p, 1, v, j), lane, across, WARP, sum);
        for (int c = 0; c < 3; c++) {
            for (int apart = WARP / 2; apart; apart /= 2)
                sum[c] += __shfl_xor_sync(ALL, sum[c], apart);
            if (lane == 0)
                sums[threadIdx.y][c] = sum[c];
        }
        __syncthreads();
        for (int c = 0; c < 3; c++) {
            u64 all = 0;
            for (int k = 0; k < 8; k++)
                all += sums[k][c];
            rgb[c] = average(p, all);
        }
    }
    if (lane == 0 && threadIdx.y == 0)
        put_pixel(out, t, rgb);
}

#define KERNEL(NAME, BODY, ...)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256) NAME(const u8* in, u8* out, Source s, Target t, Place p)     \
    {                                                                                                              \
        BODY<__VA_ARGS__>(in, out, s, t, p);                                                                       \
    }

KERNEL(picture_codes, picture, Codes)
KERNEL(picture_separate, picture, Separate)
KERNEL(picture_yuv_8, picture, Yuv<u8>)
KERNEL(picture_yuv_16, picture, Yuv<u16>)
KERNEL(picture_smooth, picture, Smooth)
KERNEL(gather_codes, gather, Codes)
KERNEL(gather_separate, gather, Separate)
KERNEL(gather_yuv_8, gather, Yuv<u8>)
KERNEL(gather_yuv_16, gather, Yuv<u16>)

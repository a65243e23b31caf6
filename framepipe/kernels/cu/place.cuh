// Where the pixels of a result come from and how they are stored. The taps of framepipe/kernels/_resample.py are
// computed on the device, so no table has to be kept there.

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

// How many source pixels an interval of AREA touches.
__device__ __forceinline__ int touched(const Place& p, int axis, const Tap& tap)
{
    return (int)divided(tap.part + p.step[axis] + p.pixel[axis] - 1, p.pixel[axis], p.magic[axis]);
}

// The weight of the k-th of them, and 0 beyond the last.
__device__ __forceinline__ u32 weight(const Place& p, int axis, const Tap& tap, u32 k)
{
    const u32 pixel = p.pixel[axis];
    return max((int)(min((k + 1) * pixel, tap.part + p.step[axis]) - max(k * pixel, tap.part)), 0);
}

__device__ __forceinline__ int average(const Place& p, u64 sum)
{
    return (int)divided(sum + p.total / 2, p.total, p.total_magic);
}

// A pixel of each of COUNT rows, if there are as many as `count`; channels are in the order in which they are stored.
template <int COUNT>
__device__ __forceinline__ void put_pixels(u8* to, const Target& t, int count, const int (&codes)[COUNT][3])
{
    if (t.kind == UINT8) {
        for (int i = 0; i < COUNT && i < count; i++)
            for (int c = 0; c < 3; c++)
                to[i * t.row + c * t.channel] = (u8)codes[i][c];
        return;
    }
    float values[COUNT][3];
    for (int i = 0; i < COUNT; i++)
        for (int c = 0; c < 3; c++)
            values[i][c] = __fadd_rn(__fmul_rn((float)codes[i][c], t.factor[c]), t.offset[c]);  // never fused
    if (t.kind == FLOAT32) {
        for (int i = 0; i < COUNT && i < count; i++)
            for (int c = 0; c < 3; c++)
                *(float*)(to + i * t.row + c * t.channel) = values[i][c];
        return;
    }
    for (int i = 0; i < COUNT && i < count; i++)
        for (int c = 0; c < 3; c++) {
            u16 bits;
            asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(values[i][c]));
            *(u16*)(to + i * t.row + c * t.channel) = bits;
        }
}

__device__ __forceinline__ void put_pixel(u8* to, const Target& t, const Three& rgb)
{
    const int red = rgb.values[0], blue = rgb.values[2];
    const int codes[1][3] = {{t.swap ? blue : red, rgb.values[1], t.swap ? red : blue}};
    put_pixels(to, t, 1, codes);
}

__device__ __forceinline__ bool is_border(const Place& p, int x, int y)
{
    return x < p.target[0] || y < p.target[1] || x >= p.target[0] + p.target[2] || y >= p.target[1] + p.target[3];
}


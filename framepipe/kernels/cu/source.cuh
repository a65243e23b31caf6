// Where the samples of a picture come from: decoded planes of any format, or RGB pictures. A reader loads what the
// pixel at (x, y) of the upright picture is made of, and makes red, green and blue codes of it: two steps, so that
// several pixels can be loaded before the first is waited for. Offsets within a picture fit 32 bits with a sign.
//
// framepipe/kernels/_colour.py has the definition. The floor of a term can wait here for that of the last shift, since
// a whole number stands between them: (((k * s) >> d) + c) >> 5 == (k * s + (c << d)) >> (d + 5). All of it fits 32
// bits with a sign.

// A sample of a component that is as large as the picture, at (x, y) of the upright picture.
template <class T>
__device__ __forceinline__ int full_sample(const u8* in, const Source& s, int component, int x, int y)
{
    return __ldg((const T*)(in + (s.origin[component] + y * s.down + x * s.across)));
}

// A chroma sample, at (x, y) of its plane.
template <class T>
__device__ __forceinline__ int chroma_sample(const u8* in, const Source& s, int component, int x, int y)
{
    return __ldg((const T*)(in + (s.origin[component] + (y * s.chroma_pitch + x * s.chroma_step))));
}

__device__ __forceinline__ int lying_x(const Source& s, int x, int y)
{
    return s.turn[0] * x + s.turn[1] * y + s.turn[2];
}

__device__ __forceinline__ int lying_y(const Source& s, int x, int y)
{
    return s.turn[3] * x + s.turn[4] * y + s.turn[5];
}

// What a pair of chroma samples adds to red, green and blue, offsets included.
__device__ __forceinline__ void chroma(const Source& s, int u, int v, int (&sum)[3])
{
    sum[0] = (int)(s.rv * v & s.mask) + s.offsets[0];
    sum[1] = s.offsets[1] - (int)(s.gu * u & s.mask) - (int)(s.gv * v & s.mask);
    sum[2] = (int)(s.bu * u & s.mask) + s.offsets[2];
}

// A code; with CODE_FRACTION more bits, what is to become one, not clipped.
#ifndef CODE_FRACTION
#define CODE_FRACTION 0
#endif

__device__ __forceinline__ int code(const Source& s, int luma, int sum)
{
    const int value = (int)(s.y * luma + sum) >> (s.shift - CODE_FRACTION);
    return CODE_FRACTION ? value : clip(value, 0, 255);
}

struct Three {
    int values[3];
};

// Samples of 8 bits that are codes already.
struct Codes {
    static __device__ __forceinline__ Three load(const Source& s, const u8* in, int x, int y)
    {
        return {full_sample<u8>(in, s, 0, x, y), full_sample<u8>(in, s, 1, x, y), full_sample<u8>(in, s, 2, x, y)};
    }

    static __device__ __forceinline__ Three codes(const Source& s, const Three& samples) { return samples; }
};

// Red, green and blue, or grey thrice, of any depth and range.
struct Separate {
    static __device__ __forceinline__ int sample(const Source& s, const u8* in, int component, int x, int y)
    {
        return s.wide ? full_sample<u16>(in, s, component, x, y) : full_sample<u8>(in, s, component, x, y);
    }

    static __device__ __forceinline__ Three load(const Source& s, const u8* in, int x, int y)
    {
        return {sample(s, in, 0, x, y), sample(s, in, 1, x, y), sample(s, in, 2, x, y)};
    }

    static __device__ __forceinline__ Three codes(const Source& s, const Three& samples)
    {
        Three rgb;
        for (int c = 0; c < 3; c++)
            rgb.values[c] = code(s, samples.values[c], s.offsets[c]);
        return rgb;
    }
};

// Luma and repeated chroma.
template <class T>
struct Yuv {
    static __device__ __forceinline__ Three load(const Source& s, const u8* in, int x, int y)
    {
        const int cx = lying_x(s, x, y) >> s.w_shift, cy = lying_y(s, x, y) >> s.h_shift;
        const int luma = full_sample<T>(in, s, 0, x, y);
        return {luma, chroma_sample<T>(in, s, 1, cx, cy), chroma_sample<T>(in, s, 2, cx, cy)};
    }

    static __device__ __forceinline__ Three codes(const Source& s, const Three& samples)
    {
        int sum[3];
        Three rgb;
        chroma(s, samples.values[1], samples.values[2], sum);
        for (int c = 0; c < 3; c++)
            rgb.values[c] = code(s, samples.values[0], sum[c]);
        return rgb;
    }
};

// Luma and interpolated chroma: sums are mixed, in 32nds of a code.
template <class T>
struct Smooth {
    static __device__ __forceinline__ void add(const Source& s, const u8* in, int x, int y, int weight, int (&mixed)[3])
    {
        int sum[3];
        chroma(s, chroma_sample<T>(in, s, 1, x, y), chroma_sample<T>(in, s, 2, x, y), sum);
        for (int c = 0; c < 3; c++)
            mixed[c] += weight * (sum[c] >> (s.shift - 5));
    }

    static __device__ __forceinline__ Three load(const Source& s, const u8* in, int ux, int uy)
    {
        const int x = lying_x(s, ux, uy), y = lying_y(s, ux, uy);
        const int left = x >> s.w_shift, right = min(left + 1, s.chroma_width - 1);
        const int q = 2 * y + 1 - (1 << s.h_shift), above = q >> (s.h_shift + 1);
        const int upper = max(above, 0), lower = min(above + 1, s.chroma_height - 1);
        const int u = x & ((1 << s.w_shift) - 1), v = q & ((2 << s.h_shift) - 1);
        const int u_rest = (1 << s.w_shift) - u, v_rest = (2 << s.h_shift) - v;
        int mixed[3] = {0, 0, 0};
        add(s, in, left, upper, u_rest * v_rest, mixed);
        add(s, in, right, upper, u * v_rest, mixed);
        add(s, in, left, lower, u_rest * v, mixed);
        add(s, in, right, lower, u * v, mixed);
        const int luma = full_sample<T>(in, s, 0, ux, uy), down = s.w_shift + s.h_shift + 1, half = 1 << (down - 1);
        Three rgb;
        for (int c = 0; c < 3; c++)
            rgb.values[c] = code(s, luma, ((mixed[c] + half) >> down) << (s.shift - 5));
        return rgb;
    }

    static __device__ __forceinline__ Three codes(const Source& s, const Three& rgb) { return rgb; }
};

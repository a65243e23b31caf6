// HDR to SDR: framepipe/kernels/_tonemap.py has the definition, the tables and the numbers of Source that are used here.
// A reader gives levels (32nds of a code) where CODE_FRACTION is 5, and this one makes codes of them.

__device__ const u32 PQ_LIGHT[] = {PQ_LIGHT_WORDS};
__device__ const u32 HLG_LIGHT[] = {HLG_LIGHT_WORDS};
__device__ const u32 HLG_DISPLAY[] = {HLG_DISPLAY_WORDS};
__device__ const u8 SDR_CODES[] = {SDR_CODE_BYTES};

// Rounded once each, and never fused.
__device__ __forceinline__ float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }

__device__ __forceinline__ float entry(const u32* table, int at) { return __uint_as_float(__ldg(table + at)); }

// Where a root from 0 to 1 (or hardly above) stands in a table.
__device__ __forceinline__ int step(float root) { return min((int)plus(times(root, ROOT_STEPS), 0.5f), ROOT_STEPS); }

// What makes the display's light of the scene's.
__device__ __forceinline__ float hlg_display(const Source& s, const float (&rgb)[3])
{
    const float green = plus(times(rgb[0], s.luminance[0]), times(rgb[1], s.luminance[1]));
    return entry(HLG_DISPLAY, step(__fsqrt_rn(__fsqrt_rn(plus(green, times(rgb[2], s.luminance[2]))))));
}

// By how much the curve changes light whose largest component is m.
__device__ __forceinline__ float ratio(const Source& s, float m)
{
    const float low = fminf(m, s.peak), below = __fdiv_rn(low, fmaxf(m, s.smallest));
    const float above = times(plus(times(low, s.ratio[1]), s.ratio[0]), below);
    return __fdiv_rn(above, plus(times(plus(times(low, s.ratio[4]), s.ratio[3]), low), s.ratio[2]));
}

// Channel c of light in BT.709's primaries, of that in BT.2020's.
__device__ __forceinline__ float narrow(const Source& s, const float (&wide)[3], int c)
{
    const float first = plus(wide[c ? 0 : 1], -wide[c]), second = plus(wide[c == 2 ? 1 : 2], -wide[c]);
    return fmaxf(plus(plus(wide[c], times(first, s.lead[c][0])), times(second, s.lead[c][1])), 0.0f);
}

__device__ __forceinline__ Three toned(const Source& s, const Three& levels)
{
    float wide[3], rgb[3];
    for (int c = 0; c < 3; c++)
        wide[c] = entry(s.hlg ? HLG_LIGHT : PQ_LIGHT, clip(levels.values[c] - CODE_HALF, 0, CODE_TOP));
    for (int c = 0; c < 3; c++)
        rgb[c] = narrow(s, wide, c);
    const float display = s.hlg ? hlg_display(s, wide) : 1.0f, most = fmaxf(fmaxf(rgb[0], rgb[1]), rgb[2]);
    const float by = times(ratio(s, times(most, display)), display);
    Three codes;
    for (int c = 0; c < 3; c++)
        codes.values[c] = __ldg(SDR_CODES + step(__fsqrt_rn(times(rgb[c], by))));
    return codes;
}

struct Toned {
    static __device__ __forceinline__ Three load(const Source& s, const u8* in, int x, int y)
    {
        return LEVELS::load(s, in, x, y);
    }

    static __device__ __forceinline__ Three codes(const Source& s, const Three& samples)
    {
        return toned(s, LEVELS::codes(s, samples));
    }
};

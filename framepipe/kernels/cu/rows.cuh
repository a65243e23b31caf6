// Eight pixels of a row at a time, from where reading is fast: planes of 4:2:0, 4:2:2 and 4:4:4 with repeated chroma,
// aligned to 16 bytes, or RGB pictures without gaps, aligned to 8 bytes. Compiled for each SAMPLE (u8, then with BYTES, or
// u16), CHROMA_W_SHIFT and CHROMA_H_SHIFT, or for IMAGES. x is a multiple of 8, of the lying picture.
//
// A cursor loads what ROWS rows from y on (a multiple of ROWS) are made of, and only loads: to load the next rows
// before the last ones are used hides the way to memory. Of two rows it reads those that are wanted, and one of them
// twice otherwise. `chroma_of` is what the rows share.

template <int WORDS>
__device__ __forceinline__ void load_words(const u8* from, u32 (&words)[WORDS])
{
    if (WORDS % 4 == 0) {
        for (int i = 0; i < WORDS / 4; i++) {
            const uint4 four = __ldg((const uint4*)from + i);
            words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
        }
    } else if (WORDS % 2 == 0) {
        for (int i = 0; i < WORDS / 2; i++) {
            const uint2 two = __ldg((const uint2*)from + i);
            words[2 * i] = two.x, words[2 * i + 1] = two.y;
        }
    } else {
        words[0] = __ldg((const u32*)from);
    }
}

// Has a sector of memory on its way to the L2 cache.
__device__ __forceinline__ void fetch(const u8* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

#ifdef IMAGES

const int ROWS = 1;

struct Loaded {
    u32 words[6];

    __device__ __forceinline__ void skip_row() {}
};

struct Chroma {};

typedef Chroma PairChroma;

// Where rows are loaded from, going down.
struct Cursor {
    const u8* at;

    __device__ __forceinline__ Cursor(const u8* in, const Source& s, int x, int y)
        : at(in + (s.origin[0] + y * s.down + x * 3))
    {
    }

    __device__ __forceinline__ void load(const Source& s, bool first, bool second, Loaded& to) const
    {
        load_words(at, to.words);
    }

    __device__ __forceinline__ void go_down(const Source& s) { at += s.down; }
};

// Where a lane fetches from, going down ROWS at a time: a warp has what its cursors will load from x to before `end` in
// the L2 cache before, a sector by each lane. (That takes no registers until it comes, as loading would.)
struct Ahead {
    const u8* at;
    int down;

    __device__ __forceinline__ Ahead(const u8* in, const Source& s, int x, int end, int y, int lane)
    {
        at = Cursor(in, s, x, y).at + (lane * 32 < (end - x) * 3 ? lane * 32 : 0);
        down = s.down;
    }

    __device__ __forceinline__ void fetch_below() { fetch(at += down); }
};

__device__ __forceinline__ Chroma chroma_of(const Source& s, const Loaded& from) { return {}; }

__device__ __forceinline__ PairChroma pair_chroma_of(const Source& s, const Loaded& from) { return {}; }

// The pixels as 24 bytes.
__device__ __forceinline__ void interleaved(
    const Source& s, const Loaded& from, const Chroma& with, int row, u32 (&words)[6])
{
    for (int i = 0; i < 6; i++)
        words[i] = from.words[i];
}

// Red, green and blue as 8 bytes each.
__device__ __forceinline__ void planar(
    const Source& s, const Loaded& from, const Chroma& with, int row, u32 (&words)[3][2])
{
    for (int half = 0; half < 2; half++) {
        const u32 a = from.words[3 * half], b = from.words[3 * half + 1], c = from.words[3 * half + 2];
        words[0][half] = __byte_perm(__byte_perm(a, b, 0x0630), c, 0x5210);
        words[1][half] = __byte_perm(__byte_perm(a, b, 0x0741), c, 0x6210);
        words[2][half] = __byte_perm(__byte_perm(a, b, 0x0052), c, 0x7410);
    }
}

// The 24 codes in pairs, each of 16 bits; FINE ones are moved up by 5.
template <bool FINE>
__device__ __forceinline__ void pairs_of(
    const Source& s, const Loaded& from, const PairChroma& with, int row, u32 (&pairs)[12])
{
    for (int i = 0; i < 6; i++) {
        pairs[2 * i] = __byte_perm(from.words[i], 0, 0x4240);
        pairs[2 * i + 1] = __byte_perm(from.words[i], 0, 0x4341);
    }
}

// Where channel c of pixel k stands among them, counted in halves of a pair.
__device__ __forceinline__ int half_at(int c, int k)
{
    const int byte = 3 * k + c;
    return byte / 4 * 4 + byte % 2 * 2 + byte / 2 % 2;
}

#else

const int PAIRS = 8 >> CHROMA_W_SHIFT, ROWS = 1 << CHROMA_H_SHIFT;
const int LUMA_WORDS = 2 * sizeof(SAMPLE), CHROMA_WORDS = PAIRS * sizeof(SAMPLE) / 4;

struct Loaded {
    u32 luma[ROWS][LUMA_WORDS], chroma[2 * CHROMA_WORDS];  // U and V, or as they stand by turns

    // Makes the second row the first.
    __device__ __forceinline__ void skip_row()
    {
        for (int i = 0; i < LUMA_WORDS; i++)
            luma[0][i] = luma[ROWS - 1][i];
    }
};

// What each chroma sample adds to the three codes of its pixels.
struct Chroma {
    int sums[PAIRS][3];
};

// Sample i of packed ones.
template <int WORDS>
__device__ __forceinline__ int unpacked(const u32 (&words)[WORDS], int i)
{
    if (sizeof(SAMPLE) == 1)
        return __byte_perm(words[i / 4], 0, 0x4440 + i % 4);
    return __byte_perm(words[i / 2], 0, i % 2 ? 0x4432 : 0x4410);
}

// Where rows are loaded from, going down ROWS at a time; y is that of the first. `beside` is from U to V where samples of
// one kind stand together, and else to the second half of both.
struct Cursor {
    const u8 *luma, *chroma;
    int beside;

    __device__ __forceinline__ Cursor(const u8* in, const Source& s, int x, int y)
    {
        const int v = s.origin[2] - s.origin[1], planes = s.chroma_step == sizeof(SAMPLE);
        const int first = s.origin[1] + (planes ? 0 : min(v, 0));
        luma = in + (s.luma + y * s.luma_pitch + x * (int)sizeof(SAMPLE));
        chroma = in + (first + (y >> CHROMA_H_SHIFT) * s.chroma_pitch + (x >> CHROMA_W_SHIFT) * s.chroma_step);
        beside = planes ? v : 4 * CHROMA_WORDS;
    }

    __device__ __forceinline__ void load(const Source& s, bool first, bool second, Loaded& to) const
    {
        for (int r = 0; r < ROWS; r++)
            load_words(luma + ((r ? second : ROWS > 1 && !first) ? s.luma_pitch : 0), to.luma[r]);
        u32 first_words[CHROMA_WORDS], last_words[CHROMA_WORDS];
        load_words(chroma, first_words);
        load_words(chroma + beside, last_words);
        for (int i = 0; i < CHROMA_WORDS; i++)
            to.chroma[i] = first_words[i], to.chroma[CHROMA_WORDS + i] = last_words[i];
    }

    __device__ __forceinline__ void go_down(const Source& s)
    {
        luma += ROWS * s.luma_pitch, chroma += s.chroma_pitch;
    }
};

// Where a lane fetches from, going down ROWS at a time: a warp has what its cursors will load from x to before `end` in
// the L2 cache before, 32 samples by each lane. (That takes no registers until it comes, as loading would.)
struct Ahead {
    const u8* at;
    int down;

    __device__ __forceinline__ Ahead(const u8* in, const Source& s, int x, int end, int y, int lane)
    {
        const int BYTES_EACH = 32 * sizeof(SAMPLE), LUMA = 8 * ROWS, CHROMA = 8 >> CHROMA_W_SHIFT;
        const bool planes = s.chroma_step == sizeof(SAMPLE);
        const Cursor first(in, s, x, y);
        if (lane < LUMA) {
            const int part = x + lane % 8 * 32 < end ? lane % 8 : 0;
            at = first.luma + lane / 8 * s.luma_pitch + part * BYTES_EACH;
            down = ROWS * s.luma_pitch;
        } else {
            const int k = lane - LUMA, part = planes ? k % CHROMA : k;
            const bool used = k < 2 * CHROMA && x + (part * (planes ? 32 : 16) << CHROMA_W_SHIFT) < end;
            at = first.chroma + (used ? (planes ? k / CHROMA * first.beside : 0) + part * BYTES_EACH : 0);
            down = s.chroma_pitch;
        }
    }

    __device__ __forceinline__ void fetch_below() { fetch(at += down); }
};

// U and V apart. (Not as soon as they are loaded: that would wait for them.)
__device__ __forceinline__ void take_apart(
    const Source& s, const Loaded& from, u32 (&us)[CHROMA_WORDS], u32 (&vs)[CHROMA_WORDS])
{
    const bool planes = CHROMA_WORDS == 1 || s.chroma_step == sizeof(SAMPLE);
    for (int i = 0; i < CHROMA_WORDS; i++) {
        const u32 first = planes ? from.chroma[i] : from.chroma[2 * i];
        const u32 second = planes ? from.chroma[CHROMA_WORDS + i] : from.chroma[2 * i + 1];
        us[i] = __byte_perm(first, second, s.take[0]);
        vs[i] = __byte_perm(first, second, s.take[1]);
    }
}

__device__ __forceinline__ Chroma chroma_of(const Source& s, const Loaded& from)
{
    u32 us[CHROMA_WORDS], vs[CHROMA_WORDS];
    take_apart(s, from, us, vs);
    Chroma to;
    for (int p = 0; p < PAIRS; p++)
        chroma(s, unpacked(us, p), unpacked(vs, p), to.sums[p]);
    return to;
}

// Channel c of pixel k of a row, before it is shifted and clipped.
__device__ __forceinline__ int level(
    const Source& s, const Loaded& from, const Chroma& with, int row, int k, int c)
{
    return (int)(s.y * unpacked(from.luma[row], k) + with.sums[k >> CHROMA_W_SHIFT][c]);
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

// The pixels as 24 bytes.
__device__ __forceinline__ void interleaved(
    const Source& s, const Loaded& from, const Chroma& with, int row, u32 (&words)[6])
{
    int codes[24];
    for (int k = 0; k < 8; k++)
        for (int c = 0; c < 3; c++)
            codes[3 * k + c] = level(s, from, with, row, k, c) >> s.shift;
    for (int k = 0; k < 6; k++)
        words[k] = packed(codes[4 * k], codes[4 * k + 1], codes[4 * k + 2], codes[4 * k + 3]);
}

// Red, green and blue as 8 bytes each.
__device__ __forceinline__ void planar(
    const Source& s, const Loaded& from, const Chroma& with, int row, u32 (&words)[3][2])
{
    for (int c = 0; c < 3; c++) {
        int codes[8];
        for (int k = 0; k < 8; k++)
            codes[k] = level(s, from, with, row, k, c) >> s.shift;
        words[c][0] = packed(codes[0], codes[1], codes[2], codes[3]);
        words[c][1] = packed(codes[4], codes[5], codes[6], codes[7]);
    }
}

#if defined(BYTES) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// What the chroma of two pixels side by side adds to their codes: 32nds of a code, 16 bits each.
struct PairChroma {
    u32 sums[4][3];
};

// Byte i of packed ones times one of `Source.factors`, which has it in either half, plus `sum`.
template <int WORDS>
__device__ __forceinline__ int times(const u32 (&words)[WORDS], int i, const u32 (&factor)[2], int sum)
{
    int product;
    if (i % 4 < 2)
        asm("dp2a.lo.s32.u32 %0, %1, %2, %3;" : "=r"(product) : "r"(factor[i % 2]), "r"(words[i / 4]), "r"(sum));
    else
        asm("dp2a.hi.s32.u32 %0, %1, %2, %3;" : "=r"(product) : "r"(factor[i % 2]), "r"(words[i / 4]), "r"(sum));
    return product;
}

// Two numbers as 16 bits each, moved down by 8: 32nds of a code.
__device__ __forceinline__ u32 two_terms(int a, int b) { return __byte_perm(a, b, 0x6521); }

__device__ __forceinline__ PairChroma pair_chroma_of(const Source& s, const Loaded& from)
{
    u32 us[CHROMA_WORDS], vs[CHROMA_WORDS];
    take_apart(s, from, us, vs);
    int sums[3][PAIRS];
    for (int i = 0; i < PAIRS; i++) {
        sums[0][i] = times(vs, i, s.factors[1], s.offsets[0]);
        // Being negative, each of these terms is rounded up: by 255 before its fraction is dropped.
        sums[1][i] = times(vs, i, s.factors[3], times(us, i, s.factors[2], s.offsets[1] + 255) | 255);
        sums[2][i] = times(us, i, s.factors[4], s.offsets[2]);
    }
    PairChroma to;
    for (int j = 0; j < 4; j++)
        for (int c = 0; c < 3; c++)
            to.sums[j][c] = two_terms(sums[c][2 * j >> CHROMA_W_SHIFT], sums[c][2 * j + 1 >> CHROMA_W_SHIFT]);
    return to;
}

// The 24 codes in pairs, each of 16 bits; FINE ones are left where they are, moved up by 5.
template <bool FINE>
__device__ __forceinline__ void pairs_of(
    const Source& s, const Loaded& from, const PairChroma& with, int row, u32 (&pairs)[12])
{
    for (int j = 0; j < 4; j++) {
        const u32 luma = two_terms(
            times(from.luma[row], 2 * j, s.factors[0], 0), times(from.luma[row], 2 * j + 1, s.factors[0], 0));
        for (int c = 0; c < 3; c++) {
            u32 pair;
            asm("add.s16x2 %0, %1, %2;" : "=r"(pair) : "r"(luma), "r"(with.sums[j][c]));
            asm("min.relu.s16x2 %0, %1, %2;" : "=r"(pair) : "r"(pair), "r"(0x1fff1fff));
            pairs[4 * c + j] = FINE ? pair & 0xffe0ffe0 : pair >> 5 & 0x00ff00ff;
        }
    }
}

#else

typedef Chroma PairChroma;

__device__ __forceinline__ PairChroma pair_chroma_of(const Source& s, const Loaded& from) { return chroma_of(s, from); }

// The 24 codes in pairs, each of 16 bits; FINE ones are moved up by 5.
template <bool FINE>
__device__ __forceinline__ void pairs_of(
    const Source& s, const Loaded& from, const PairChroma& with, int row, u32 (&pairs)[12])
{
    for (int c = 0; c < 3; c++)
        for (int j = 0; j < 4; j++) {
            const int a = level(s, from, with, row, 2 * j, c) >> s.shift;
            const int b = level(s, from, with, row, 2 * j + 1, c) >> s.shift;
            pairs[4 * c + j] = __byte_perm(packed(a, b, 0, 0), 0, 0x4140) << (FINE ? 5 : 0);
        }
}

#endif

// Where channel c of pixel k stands among them, counted in halves of a pair.
__device__ __forceinline__ int half_at(int c, int k) { return 8 * c + k; }

#endif

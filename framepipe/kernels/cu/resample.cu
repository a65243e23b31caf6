// Planes or pictures resampled to tensors and pictures by area or bilinear: see rows.cuh. A warp makes a few rows of some
// columns of the result. For each row its lanes make codes of 8 source columns each and sum them down, in registers,
// over the rows of an output row; then a lane sums these across for an output pixel. These are whole numbers, so the
// order makes no difference. Both methods are the average over an interval of source pixels, that of BILINEAR being
// one pixel long. Warps do not wait for each other, so that some wait for memory while others compute.
//
// NARROW sums down fit 16 bits and weights across fit 8: then numbers go in pairs, and rows, too. FINE ones fit even where
// each code is moved up by 5, which saves moving it down first. Shared memory holds the sums of each warp, of each row and
// channel, then rows of pixels (ROW_BYTES a warp), then where each column's taps begin, then their weights; the warps of a
// block make rows of the same columns.

const int WARPS = 4;  // of a block
const int ROW_BYTES = WARP * 12 + 16;

extern __shared__ uint4 dynamic[];

// What stands `at` so many bytes in shared memory.
template <class T>
__device__ __forceinline__ T& shared(int at)
{
    return *(T*)((u8*)dynamic + at);
}

// A tap whose interval is within the source, in units of `place.pixel`.
template <Method METHOD>
__device__ __forceinline__ Tap inside_tap(const Place& p, const Tiling& tiling, int axis, int d)
{
    const Tap at = tap<METHOD>(p, axis, d);
    if (METHOD == AREA)
        return at;
    if (at.first < 0)
        return {0, 0};
    return {at.first, at.first < p.source[2 + axis] - 1 ? at.part >> tiling.bits[axis] : 0};
}

// How many source pixels its interval touches.
template <Method METHOD>
__device__ __forceinline__ int touched_inside(const Place& p, int axis, const Tap& at)
{
    return METHOD == AREA ? touched(p, axis, at) : at.part ? 2 : 1;
}

enum Width { WIDE, NARROW, FINE };

// The sums of 8 columns. (The remainders keep what is not compiled for PAIRED ones, or for others, within bounds.)
template <Width WIDTH>
struct Sums {
    static const bool PAIRED = WIDTH != WIDE;
    static const int CHANNEL = 256 * (PAIRED ? 2 : 4);  // bytes of a row of them
    static const int TOGETHER = PAIRED ? 2 : 1;         // rows that are summed across together
    static const int ALL = 3 * 256 * 4 + 16;            // of a warp, and what words of weights 0 read beyond

    u32 values[PAIRED ? 12 : 24];

    __device__ __forceinline__ void add(const u32 (&pairs)[12], u32 weight)
    {
        for (int i = 0; i < 12; i++) {
            if (PAIRED) {
                values[i] += pairs[i] * weight;
            } else {
                values[(2 * i) % (PAIRED ? 12 : 24)] += (pairs[i] & 0xffff) * weight;
                values[(2 * i + 1) % (PAIRED ? 12 : 24)] += (pairs[i] >> 16) * weight;
            }
        }
    }

    // To shared memory, in the order in which the channels are stored.
    __device__ __forceinline__ void store(int to, bool swap) const
    {
        const int channels[3] = {swap ? 2 * CHANNEL : 0, CHANNEL, swap ? 0 : 2 * CHANNEL};
        for (int c = 0; c < 3; c++) {
            u32 words[PAIRED ? 4 : 8];
            for (int k = 0; k < 8; k += PAIRED ? 2 : 1) {
                const int a = half_at(c, k), b = half_at(c, k + PAIRED);
                if (PAIRED)
                    words[k / 2] = __byte_perm(
                        values[a / 2], values[b / 2], (a % 2 ? 0x32 : 0x10) | (b % 2 ? 0x7600 : 0x5400));
                else
                    words[k % (PAIRED ? 4 : 8)] = values[a % (PAIRED ? 12 : 24)];
            }
            for (int i = 0; i < (PAIRED ? 1 : 2); i++)
                shared<uint4>(to + channels[c] + 16 * i) =
                    make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
        }
    }
};

// Sums down 8 columns from x on, of those of the warp from x0 to before x1, for output rows from `first` to before `end`
// one after the other.
template <Method METHOD, Width WIDTH>
struct Down {
    const u8* in;
    int x;

    __device__ __forceinline__ Down(
        const u8* in, const Source& s, const Place& p, const Tiling& tiling, int x0, int x1, int x, int first, int end)
        : in(in), x(x)
    {
    }

    // Every output row on its own.
    __device__ __forceinline__ Sums<WIDTH> next(const Source& s, const Place& p, const Tiling& tiling, int d)
    {
        Sums<WIDTH> sums = {};
        const Tap v = inside_tap<METHOD>(p, tiling, 1, d);
        const int top = p.source[1] + v.first, bottom = top + touched_inside<METHOD>(p, 1, v);
        Cursor cursor(in, s, x, top & ~(ROWS - 1));
        for (int y = top & ~(ROWS - 1); y < bottom; y += ROWS, cursor.go_down(s)) {
            Loaded loaded;
            cursor.load(s, y >= top, y + 1 < bottom, loaded);
            const PairChroma chroma = pair_chroma_of(s, loaded);
            for (int r = 0; r < ROWS; r++) {
                if (y + r < top || y + r >= bottom)
                    continue;
                u32 pairs[12];
                pairs_of<WIDTH == FINE>(s, loaded, chroma, r, pairs);
                sums.add(pairs, weight(p, 1, v, y + r - top));
            }
        }
        return sums;
    }
};

// By AREA an interval begins where the last one ended, so each source row is converted once: `pairs` are those of the
// row above y, of which `rest` units are not summed yet. Intervals are one source pixel long or longer; `before` are
// units above the first. While rows are used the next ones are loaded, and those below these fetched.
template <Width WIDTH>
struct Down<AREA, WIDTH> {
    Cursor cursor;
    Ahead ahead;
    Loaded now, coming;
    PairChroma chroma;
    u32 pairs[12], rest, before;
    int y, bottom;

    __device__ __forceinline__ Down(
        const u8* in, const Source& s, const Place& p, const Tiling& tiling, int x0, int x1, int x, int first, int end)
        : cursor(in, s, x, top_of(p, first)), ahead(in, s, x0, x1, top_of(p, first), threadIdx.x), rest(0)
    {
        const Tap top = tap<AREA>(p, 1, first), last = tap<AREA>(p, 1, end - 1);
        y = top_of(p, first);
        before = top.part + (p.source[1] + top.first - y) * p.pixel[1];
        bottom = p.source[1] + last.first + touched(p, 1, last);
        cursor.load(s, true, y + 1 < bottom, coming);
        if (y + 2 * ROWS <= bottom)
            ahead.fetch_below();
    }

    // Where reading begins for output row `first`.
    static __device__ __forceinline__ int top_of(const Place& p, int first)
    {
        return (p.source[1] + tap<AREA>(p, 1, first).first) & ~(ROWS - 1);
    }

    // Row y, from what was loaded; what comes next is loaded once that is used. (In one place: two would load to different
    // registers, which are then moved, and to move them is to wait for them.)
    __device__ __forceinline__ void convert(const Source& s)
    {
        const bool first = y % ROWS == 0;
        if (first) {
            now = coming;
            chroma = pair_chroma_of(s, now);
        }
        pairs_of<WIDTH == FINE>(s, now, chroma, 0, pairs);
        now.skip_row();
        if (first && y + ROWS < bottom) {
            cursor.go_down(s);
            cursor.load(s, true, y + ROWS + 1 < bottom, coming);
            if (y + 3 * ROWS <= bottom)
                ahead.fetch_below();
        }
        y++;
    }

    __device__ __forceinline__ Sums<WIDTH> next(const Source& s, const Place& p, const Tiling& tiling, int d)
    {
        Sums<WIDTH> sums;
        bool above;
        do {
            sums = {};
            above = before != 0;
            u32 missing = above ? before : p.step[1];
            before = 0;
            do {
                if (rest == 0) {
                    convert(s);
                    rest = p.pixel[1];
                }
                const u32 weight = min(rest, missing);
                sums.add(pairs, weight);
                missing -= weight, rest -= weight;
            } while (missing);
        } while (above);
        return sums;
    }
};

// Output columns of the tile from `left` on: where their taps begin, from column x0 on, and the weights of
// `tiling.taps` words. NARROW taps begin at an even column, and four weights stand in a word. Columns that fill up the
// last warp's width weigh nothing.
template <Method METHOD, Width WIDTH>
__device__ __forceinline__ void make_taps(const Place& p, const Tiling& tiling, int left, int x0)
{
    const bool PAIRED = WIDTH != WIDE;
    const int thread = threadIdx.y * WARP + threadIdx.x, count = min(tiling.columns, p.target[2] - left);
    for (int i = thread; 4 * i < tiling.pitch; i += WARPS * WARP) {
        const Tap h = inside_tap<METHOD>(p, tiling, 0, left + min(i, count - 1));
        const int from = p.source[0] + h.first - x0, odd = PAIRED ? from & 1 : 0;
        shared<int>(tiling.begins + 4 * i) = (from - odd) * (PAIRED ? 2 : 4);
        for (int k = 0; k < tiling.taps; k++) {
            u32 word = 0;
            if (PAIRED) {
                for (int j = 0; j < 4; j++)
                    word |= (4 * k + j < odd ? 0 : weight(p, 0, h, 4 * k + j - odd)) << 8 * j;
            } else {
                word = weight(p, 0, h, k);
            }
            shared<u32>(tiling.weights + k * tiling.pitch + 4 * i) = word;
        }
    }
}

// Adds to `sum` the two 16-bit halves of a word times the two lower or HIGHER bytes of `weights`. Not by __dp2a_lo, which
// the compiler of CUDA 12.0 does not know; GPUs before 6.1 have no such instruction.
template <bool HIGH>
__device__ __forceinline__ u32 add_products(u32 halves, u32 weights, u32 sum)
{
#if __CUDA_ARCH__ >= 610
    if (HIGH)
        asm("dp2a.hi.u32.u32 %0, %1, %2, %0;" : "+r"(sum) : "r"(halves), "r"(weights));
    else
        asm("dp2a.lo.u32.u32 %0, %1, %2, %0;" : "+r"(sum) : "r"(halves), "r"(weights));
    return sum;
#else
    const u32 two = HIGH ? weights >> 16 : weights;
    return sum + (halves & 0xffff) * (two & 0xff) + (halves >> 16) * (two >> 8 & 0xff);
#endif
}

// Adds up the pixels of a column in COUNT rows: sums down from `at` on times weights from `weights` on.
template <Width WIDTH, int COUNT>
__device__ __forceinline__ void sum_across(int at, int weights, const Tiling& tiling, u32 (&sum)[COUNT][3])
{
    const bool PAIRED = WIDTH != WIDE;
    const int CHANNEL = Sums<WIDTH>::CHANNEL;
    for (int left = tiling.taps;;) {
        const u32 w = shared<u32>(weights);
        for (int i = 0; i < COUNT; i++)
            for (int c = 0; c < 3; c++) {
                const u32 first = shared<u32>(at + (3 * i + c) * CHANNEL);
                if (PAIRED) {
                    sum[i][c] = add_products<false>(first, w, sum[i][c]);
                    const u32 second = shared<u32>(at + (3 * i + c) * CHANNEL + 4);
                    sum[i][c] = add_products<true>(second, w, sum[i][c]);
                } else {
                    sum[i][c] += first * w;
                }
            }
        if (--left == 0)
            break;
        at += PAIRED ? 8 : 4, weights += tiling.pitch;
    }
}

// One warp fills n bytes from `to` on, a multiple of the 1, 2 or 4 that they repeat after, with 16 at a time.
__device__ __forceinline__ void fill_bytes(u8* to, int n, const uint4& sixteen, int lane)
{
    const int head = min((int)(-(size_t)to & 15), n), tail = (n - head) & 15;
    for (int at = head + lane * 16; at + 16 <= n; at += WARP * 16)
        *(uint4*)(to + at) = sixteen;
    // The rest, less than 16 bytes before and behind: whatever repeats does so from each multiple of 4 on.
    const int at = lane < 16 ? lane : n - 32 + lane;
    if (lane < 16 ? lane < head : 32 - lane <= tail)
        to[at] = (u8)(sixteen.x >> ((size_t)(to + at) & 3) * 8);
}

// One warp fills n pixels from `to` on with the colour of the border; `row` is shared memory of its own.
__device__ __forceinline__ void fill(u8* to, int n, const Target& t, const Place& p, u8* row, int lane)
{
    const Three color = {p.color[0], p.color[1], p.color[2]};
    Target near = t;
    near.channel = t.together ? t.channel : 16;
    if (t.together || lane * t.column < 16)
        put_pixel(row + lane * t.column, near, color);
    __syncwarp();
    for (int at = 0; at < n && t.together; at += WARP)
        store_row<true>(to + (i64)at * t.column, row, min(WARP, n - at) * t.column, lane);
    for (int c = 0; c < 3 && !t.together; c++)
        fill_bytes(to + c * t.channel, n * t.column, *(const uint4*)(row + c * 16), lane);
    __syncwarp();
}

// One warp fills what is beside the part of the result in the y-th of the rows that have a border.
__device__ __forceinline__ void border(u8* out, const Target& t, const Place& p, int y, u8* row)
{
    const int left = p.target[0], right = left + p.target[2], top = p.target[1], lane = threadIdx.x;
    if (left == 0 && right == t.width && y >= top)
        y += p.target[3];
    const bool whole = y < top || y >= top + p.target[3];
#pragma unroll 1
    for (int side = 0; side < (whole ? 1 : 2); side++) {
        const int begin = side ? right : 0, end = whole || side ? t.width : left;
        fill(out + y * t.row + (i64)begin * t.column, end - begin, t, p, row, lane);
    }
}

// One warp sums `columns` pixels of `count` rows across and stores them.
template <Width WIDTH>
__device__ __forceinline__ void put_rows(
    u8* to, int count, int columns, int sums, const Target& t, const Tiling& tiling, int pixels)
{
    const int COUNT = Sums<WIDTH>::TOGETHER, lane = threadIdx.x;
    u8* at = to + lane * t.column;
    int k = 4 * lane;
#pragma unroll 1
    for (int left = columns; left > 0; left -= WARP, k += 4 * WARP, at += WARP * t.column) {
        u32 sum[COUNT][3] = {};
        int codes[COUNT][3];
        sum_across<WIDTH>(sums + shared<int>(tiling.begins + k), tiling.weights + k, tiling, sum);
        for (int i = 0; i < COUNT; i++)
            for (int c = 0; c < 3; c++)
                codes[i][c] = (int)((u32)((sum[i][c] * (u64)tiling.magic + tiling.half) >> 32) >> tiling.shift);
        if (!t.together) {
            if (lane < left)
                put_pixels(at, t, count, codes);
            continue;
        }
        Target near = t;
        near.row = 0;
        for (int i = 0; i < COUNT && i < count; i++) {
            const int one[1][3] = {{codes[i][0], codes[i][1], codes[i][2]}};
            put_pixels(&shared<u8>(pixels + lane * t.column), near, 1, one);
            __syncwarp();
            store_row<true>(
                at - lane * t.column + i * t.row, &shared<u8>(pixels), min(left, WARP) * t.column, lane);
            __syncwarp();
        }
    }
}

template <Method METHOD, Width WIDTH>
__device__ __forceinline__ void resample(
    const u8* in, u8* out, const Source& s, const Target& t, const Place& p, const Tiling& tiling)
{
    const bool PAIRED = WIDTH != WIDE;
    const int CHANNEL = Sums<WIDTH>::CHANNEL, TOGETHER = Sums<WIDTH>::TOGETHER;
    const int warp = threadIdx.y, lane = threadIdx.x, tile = blockIdx.x;
    const int sums = warp * Sums<WIDTH>::ALL, pixels = tiling.pixels + warp * ROW_BYTES;
    in += blockIdx.z * s.picture;
    out += blockIdx.z * t.picture;
    const int left = tile % tiling.across * tiling.columns, top = (tile / tiling.across * WARPS + warp) * tiling.rows;
    const int columns = min(tiling.columns, p.target[2] - left), rows = min(tiling.rows, p.target[3] - top);
    const Tap begin = inside_tap<METHOD>(p, tiling, 0, left);
    const Tap last = inside_tap<METHOD>(p, tiling, 0, left + columns - 1);
    const int x0 = (p.source[0] + begin.first) & ~7;
    const int end = p.source[0] + last.first + touched_inside<METHOD>(p, 0, last);
    // Warps fill the border at different times, so that memory stores it while others compute.
    const int number = tile * WARPS + warp, when = number % max(1, min(tiling.rows, rows)) & ~(TOGETHER - 1);
    const bool busy = x0 + lane * 8 < end && rows > 0;
    Down<METHOD, WIDTH> down(  // before the taps: it waits for memory
        in, s, p, tiling, x0, end, busy ? x0 + lane * 8 : x0, min(top, p.target[3] - 1),
        min(top + max(rows, 1), p.target[3]));
    make_taps<METHOD, WIDTH>(p, tiling, left, x0);
    __syncthreads();
    u8* to = out + (p.target[1] + top) * t.row + (i64)(p.target[0] + left) * t.column;
    for (int k = 0; k < rows || k == 0; k += TOGETHER, to += TOGETHER * t.row) {
        if (k == when)
            for (int y = number; y < tiling.beside; y += gridDim.x * WARPS)
                border(out, t, p, y, &shared<u8>(pixels));
        const int count = min(rows - k, TOGETHER);
#pragma unroll 1
        for (int i = 0; i < count; i++)
            if (busy)
                down.next(s, p, tiling, top + k + i)
                    .store(sums + i * 3 * CHANNEL + lane * 8 * (PAIRED ? 2 : 4), t.swap);
        __syncwarp();
        put_rows<WIDTH>(to, count, rows > 0 ? columns : 0, sums, t, tiling, pixels);
        __syncwarp();
    }
}

#define KERNEL(NAME, METHOD, WIDTH, BLOCKS)                                                                \
    extern "C" __global__ void __launch_bounds__(WARPS * WARP, BLOCKS) NAME(const u8* in, u8* out, TiledJob job)    \
    {                                                                                                      \
        resample<METHOD, WIDTH>(in, out, job.source, job.target, job.place, job.tiling);                   \
    }

// As many blocks at a time as bring most: by AREA the rows on their way want the registers (_PLACES in _cuda_rows.py).
KERNEL(area_narrow, AREA, NARROW, 5)
KERNEL(area_wide, AREA, WIDE, 5)
KERNEL(bilinear_narrow, BILINEAR, NARROW, 8)
KERNEL(bilinear_wide, BILINEAR, WIDE, 8)
#ifdef BYTES
KERNEL(area_fine, AREA, FINE, 5)
#endif

// Planes or pictures resampled to tensors and pictures by area or bilinear: see rows.cuh. A block makes a tile of the
// result, a few rows at a time. First a warp makes codes of 8 source columns a lane and sums them down, in registers,
// over the rows of an output row; then a lane sums these across for an output pixel. These are whole numbers, so the
// order makes no difference. Both methods are the average over an interval of source pixels, that of BILINEAR being
// one pixel long.
//
// NARROW sums down fit 16 bits and weights across fit 8: then numbers go in pairs. Shared memory holds the sums, a row
// for each output row and channel (of NARROW ones those of two steps by turns, so that a warp may go on down while
// others still sum across), then rows of pixels (ROW_BYTES a warp), then where each column's taps begin, then their
// weights.

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

// The sums of 8 columns. (The remainders keep what is not compiled for NARROW, or for others, within bounds.)
template <bool NARROW>
struct Sums {
    u32 values[NARROW ? 12 : 24];

    __device__ __forceinline__ void add(const u32 (&pairs)[12], u32 weight)
    {
        for (int i = 0; i < 12; i++) {
            if (NARROW) {
                values[i] += pairs[i] * weight;
            } else {
                values[(2 * i) % (NARROW ? 12 : 24)] += (pairs[i] & 0xffff) * weight;
                values[(2 * i + 1) % (NARROW ? 12 : 24)] += (pairs[i] >> 16) * weight;
            }
        }
    }

    // To shared memory, where the channels are `channel` bytes apart.
    __device__ __forceinline__ void store(int to, int channel) const
    {
        for (int c = 0; c < 3; c++) {
            u32 words[NARROW ? 4 : 8];
            for (int k = 0; k < 8; k += NARROW ? 2 : 1) {
                const int a = half_at(c, k), b = half_at(c, k + NARROW);
                if (NARROW)
                    words[k / 2] = __byte_perm(
                        values[a / 2], values[b / 2], (a % 2 ? 0x32 : 0x10) | (b % 2 ? 0x7600 : 0x5400));
                else
                    words[k % (NARROW ? 4 : 8)] = values[a % (NARROW ? 12 : 24)];
            }
            for (int i = 0; i < (NARROW ? 1 : 2); i++)
                shared<uint4>(to + c * channel + 16 * i) =
                    make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
        }
    }
};

// Sums down 8 columns from x on, for output rows from `first` to before `end` one after the other.
template <Method METHOD, bool NARROW>
struct Down {
    const u8* in;
    int x;

    __device__ __forceinline__ Down(
        const u8* in, const Source& s, const Place& p, const Tiling& tiling, int x, int first, int end)
        : in(in), x(x)
    {
    }

    // Every output row on its own.
    __device__ __forceinline__ Sums<NARROW> next(const Source& s, const Place& p, const Tiling& tiling, int d)
    {
        Sums<NARROW> sums = {};
        const Tap v = inside_tap<METHOD>(p, tiling, 1, d);
        const int top = p.source[1] + v.first, bottom = top + touched_inside<METHOD>(p, 1, v);
        Cursor cursor(in, s, x, top & ~(ROWS - 1));
        for (int y = top & ~(ROWS - 1); y < bottom; y += ROWS, cursor.go_down(s)) {
            Loaded loaded;
            cursor.load(s, y >= top, y + 1 < bottom, loaded);
            const Chroma chroma = chroma_of(s, loaded);
            for (int r = 0; r < ROWS; r++) {
                if (y + r < top || y + r >= bottom)
                    continue;
                u32 pairs[12];
                pairs_of(s, loaded, chroma, r, pairs);
                sums.add(pairs, weight(p, 1, v, y + r - top));
            }
        }
        return sums;
    }
};

// By AREA an interval begins where the last one ended, so each source row is converted once: `pairs` are those of the
// row above y, of which `rest` units are not summed yet. Intervals are one source pixel long or longer; `before` are
// units above the first.
template <bool NARROW>
struct Down<AREA, NARROW> {
    Cursor cursor;
    Loaded now, coming;
    Chroma chroma;
    u32 pairs[12], rest, before;
    int y, bottom;

    __device__ __forceinline__ Down(
        const u8* in, const Source& s, const Place& p, const Tiling& tiling, int x, int first, int end)
        : cursor(in, s, x, (p.source[1] + tap<AREA>(p, 1, first).first) & ~(ROWS - 1)), rest(0)
    {
        const Tap top = tap<AREA>(p, 1, first), last = tap<AREA>(p, 1, end - 1);
        const int above = (p.source[1] + top.first) & (ROWS - 1);
        before = top.part + above * p.pixel[1];
        y = p.source[1] + top.first - above;
        bottom = p.source[1] + last.first + touched(p, 1, last);
        cursor.load(s, true, y + 1 < bottom, coming);
    }

    // What comes next, once `coming` is used. (A load that is made in any case, beside its last use, would be scheduled
    // before it, go to other registers and be waited for at once, to be moved.)
    __device__ __forceinline__ void load_below(const Source& s)
    {
        const int below = y + ROWS - 1;
        if (y % ROWS == 1 % ROWS && below < bottom) {
            cursor.go_down(s);
            cursor.load(s, true, below + 1 < bottom, coming);
        }
    }

    __device__ __forceinline__ void go_on(const Source& s, const Place& p)
    {
        if (y % ROWS == 0) {
            now = coming;
            chroma = chroma_of(s, now);
        } else {
            now.skip_row();
        }
        y++;
        pairs_of(s, now, chroma, 0, pairs);
        const u32 skipped = min(before, p.pixel[1]);
        before -= skipped;
        rest = p.pixel[1] - skipped;
        load_below(s);
    }

    // The next two rows, where these are of one output row.
    __device__ __forceinline__ void add_both(const Source& s, const Place& p, Sums<NARROW>& sums)
    {
        now = coming;
        chroma = chroma_of(s, now);
        pairs_of(s, now, chroma, 0, pairs);
        sums.add(pairs, p.pixel[1]);
        y++;
        load_below(s);
        now.skip_row();
        pairs_of(s, now, chroma, 0, pairs);
        sums.add(pairs, p.pixel[1]);
        y++;
    }

    __device__ __forceinline__ Sums<NARROW> next(const Source& s, const Place& p, const Tiling& tiling, int d)
    {
        Sums<NARROW> sums = {};
        for (u32 missing = p.step[1]; missing;) {
            if (rest == 0) {
                if (ROWS == 2 && y % ROWS == 0 && missing >= 2 * p.pixel[1] && before == 0) {
                    add_both(s, p, sums);
                    missing -= 2 * p.pixel[1];
                    continue;
                }
                go_on(s, p);
            }
            const u32 weight = min(rest, missing);
            sums.add(pairs, weight);
            missing -= weight, rest -= weight;
        }
        return sums;
    }
};

// Output columns of the tile from `left` on: where their taps begin, from column x0 on, and the weights of
// `tiling.taps` words. NARROW taps begin at an even column, and four weights stand in a word.
template <Method METHOD, bool NARROW>
__device__ __forceinline__ void make_taps(const Place& p, const Tiling& tiling, int left, int x0)
{
    const int thread = threadIdx.y * WARP + threadIdx.x, count = min(tiling.columns, p.target[2] - left);
    for (int i = thread; i < count; i += 8 * WARP) {
        const Tap h = inside_tap<METHOD>(p, tiling, 0, left + i);
        const int from = p.source[0] + h.first - x0, odd = NARROW ? from & 1 : 0;
        shared<int>(tiling.begins + 4 * i) = (from - odd) * (NARROW ? 2 : 4);
        for (int k = 0; k < tiling.taps; k++) {
            u32 word = 0;
            if (NARROW) {
                for (int j = 0; j < 4; j++)
                    word |= (4 * k + j < odd ? 0 : weight(p, 0, h, 4 * k + j - odd)) << 8 * j;
            } else {
                word = weight(p, 0, h, k);
            }
            shared<u32>(tiling.weights + 4 * (k * tiling.columns + i)) = word;
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

// Adds up output pixels of a column: sums down from `at` on times weights from `weights` on.
template <bool NARROW, int COUNT>
__device__ __forceinline__ void sum_across(
    const int (&at)[COUNT], int channel, int weights, const Tiling& tiling, u32 (&sum)[COUNT][3])
{
    int left = tiling.taps, more = 0;
#pragma unroll 1
    do {
        const u32 w = shared<u32>(weights);
        for (int i = 0; i < COUNT; i++)
            for (int c = 0; c < 3; c++) {
                const u32 first = shared<u32>(at[i] + more + c * channel);
                if (NARROW) {
                    sum[i][c] = add_products<false>(first, w, sum[i][c]);
                    const u32 second = shared<u32>(at[i] + more + c * channel + 4);
                    sum[i][c] = add_products<true>(second, w, sum[i][c]);
                } else {
                    sum[i][c] += first * w;
                }
            }
        more += NARROW ? 8 : 4, weights += 4 * tiling.columns;
    } while (--left);
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
    if (y >= t.height)
        return;
    const bool whole = y < top || y >= top + p.target[3];
#pragma unroll 1
    for (int side = 0; side < (whole ? 1 : 2); side++) {
        const int begin = side ? right : 0, end = whole || side ? t.width : left;
        fill(out + y * t.row + (i64)begin * t.column, end - begin, t, p, row, lane);
    }
}

// `count` output pixels of each of two rows, a pixel a lane, from column x of the tile on. The second may not be there.
template <bool NARROW>
__device__ __forceinline__ void put_runs(
    u8* const (&to)[2], bool both, int sums, int channel, const Target& t, const Tiling& tiling, int x, int count,
    int pixels)
{
    const int lane = threadIdx.x, k = 4 * (x + min(lane, count - 1));
    const int begin = sums + shared<int>(tiling.begins + k), at[2] = {begin, both ? begin + 3 * channel : begin};
    const u32 half = tiling.half;
    u32 sum[2][3] = {{half, half, half}, {half, half, half}};
    sum_across<NARROW>(at, channel, tiling.weights + k, tiling, sum);
    for (int i = 0; i < 2; i++) {
        Three rgb;
        for (int c = 0; c < 3; c++)
            rgb.values[c] = (int)(__umulhi(sum[i][c], tiling.magic) >> tiling.shift);
        if (i && !both)
            break;
        if (t.together) {
            if (lane < count)
                put_pixel(&shared<u8>(pixels + lane * t.column), t, rgb);
            __syncwarp();
            store_row<true>(to[i], &shared<u8>(pixels), count * t.column, lane);
            __syncwarp();
        } else if (lane < count) {
            put_pixel(to[i] + lane * t.column, t, rgb);
        }
    }
}

template <Method METHOD, bool NARROW>
__device__ __forceinline__ void resample(
    const u8* in, u8* out, const Source& s, const Target& t, const Place& p, const Tiling& tiling)
{
    const int warp = threadIdx.y, lane = threadIdx.x, tile = blockIdx.x, pixels = tiling.pixels + warp * ROW_BYTES;
    in += blockIdx.z * s.picture;
    out += blockIdx.z * t.picture;
    const int groups = 8 / tiling.parts, deep = tiling.rows;
    const int left = tile % tiling.across * tiling.columns, top = tile / tiling.across * groups * deep;
    const int columns = min(tiling.columns, p.target[2] - left), rows = p.target[3] - top;
    const Tap begin = inside_tap<METHOD>(p, tiling, 0, left);
    const Tap last = inside_tap<METHOD>(p, tiling, 0, left + columns - 1);
    const int x0 = (p.source[0] + begin.first) & ~7;
    const int end = p.source[0] + last.first + touched_inside<METHOD>(p, 0, last);
    const int channel = tiling.parts * 256 * (NARROW ? 2 : 4), runs = (columns + WARP - 1) / WARP;
    make_taps<METHOD, NARROW>(p, tiling, left, x0);
    const int i = (warp % tiling.parts * WARP + lane) * 8, group = warp / tiling.parts, first = group * deep;
    const bool busy = x0 + i < end && first < rows;
    Down<METHOD, NARROW> down(
        in, s, p, tiling, busy ? x0 + i : x0, top + min(first, rows - 1), top + min(first + deep, rows));
    u8* part = out + (p.target[1] + top) * t.row + (i64)(p.target[0] + left) * t.column;
    const int first_run = warp % runs, first_group = warp / runs, more_runs = 8 % runs, more_groups = 8 / runs;
    for (int k = 0; k < deep; k++) {
        // A little of the border at a time, so that memory stores it while others compute.
        for (int at = (warp - k) & 7; at < tiling.beside; at += 8)
            border(out, t, p, (tile * deep + k) * tiling.beside + at, &shared<u8>(pixels));
        const int sums = NARROW && k & 1 ? tiling.turn : 0;
        if (busy && first + k < rows)
            down.next(s, p, tiling, top + first + k)
                .store(sums + group * 3 * channel + i * (NARROW ? 2 : 4), channel);
        __syncthreads();
        for (int g = first_group, run = first_run; 2 * g < groups; g += more_groups, run += more_runs) {
            if (run >= runs)
                run -= runs, g++;
            const int row = 2 * g * deep + k, x = run * WARP;
            if (2 * g >= groups || row >= rows)
                break;
            u8* to = part + row * t.row + x * t.column;
            put_runs<NARROW>(
                {to, to + deep * t.row}, 2 * g + 1 < groups && row + deep < rows, sums + 2 * g * 3 * channel, channel,
                t, tiling, x, min(WARP, columns - x), pixels);
        }
        if (!NARROW)
            __syncthreads();
    }
}

#define KERNEL(NAME, METHOD, NARROW, BLOCKS)                                                               \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) NAME(const u8* in, u8* out, TiledJob job)    \
    {                                                                                                      \
        resample<METHOD, NARROW>(in, out, job.source, job.target, job.place, job.tiling);                  \
    }

// As many blocks at a time as bring most: by AREA the rows on their way want the registers (_PLACES in _cuda_rows.py).
KERNEL(area_narrow, AREA, true, 3)
KERNEL(area_wide, AREA, false, 3)
KERNEL(bilinear_narrow, BILINEAR, true, 4)
KERNEL(bilinear_wide, BILINEAR, false, 4)

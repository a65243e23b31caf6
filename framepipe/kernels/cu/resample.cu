// Planes or pictures resampled to tensors and pictures by area or bilinear: see rows.cuh. A block makes a tile of the
// result, a few rows at a time. First a warp makes codes of 8 source columns a lane and sums them down, in registers, over
// the rows of an output row; then a lane sums these across for an output pixel. Whole numbers, so the order makes no
// difference. Both methods are the average over an interval of source pixels, that of BILINEAR being one pixel long.
//
// NARROW sums down fit 16 bits and weights across fit 8: then numbers go in pairs. Shared memory holds the sums, a row
// for each output row and channel, then where each column's taps begin, then their weights, then rows of pixels
// (ROW_BYTES a warp).

const int ROW_BYTES = WARP * 12 + 16;

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

// The sums of 8 columns.
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

    // To `to`, of which the channels are `channel` bytes apart.
    __device__ __forceinline__ void store(u8* to, int channel) const
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
                *(uint4*)(to + c * channel + 16 * i) =
                    make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
        }
    }
};

// Sums down 8 columns from x on, for output rows from `first` to before `end` one after the other.
template <Method METHOD, bool NARROW>
struct Down {
    const u8* in;
    int x, first, end;

    __device__ __forceinline__ Down(
        const u8* in, const Source& s, const Place& p, const Tiling& tiling, int x, int first, int end)
        : in(in), x(x) {}

    // Every output row on its own.
    __device__ __forceinline__ Sums<NARROW> next(const Source& s, const Place& p, const Tiling& tiling, int d)
    {
        Sums<NARROW> sums = {};
        const Tap v = inside_tap<METHOD>(p, tiling, 1, d);
        const int top = p.source[1] + v.first, bottom = top + touched_inside<METHOD>(p, 1, v);
        Cursor cursor(in, s, x, top & ~(ROWS - 1));
        for (int y = top & ~(ROWS - 1); y < bottom; y += ROWS, cursor.go_down(s)) {
            Loaded loaded;
            cursor.load(s, y, loaded);
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

// By AREA an interval begins where the last one ended, so each source row is converted once: `pairs` are those of the row
// above y, of which `rest` units are not summed yet. Intervals are one source pixel long or longer; `before` are units
// above the first.
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
        cursor.load(s, y, coming);
    }

    __device__ __forceinline__ void go_on(const Source& s, const Place& p)
    {
        if (y % ROWS == 0) {
            now = coming;
            cursor.go_down(s);
            if (y + ROWS < bottom)
                cursor.load(s, y + ROWS, coming);
            chroma = chroma_of(s, now);
        } else {
            now.skip_row();
        }
        y++;
        pairs_of(s, now, chroma, 0, pairs);
        const u32 skipped = min(before, p.pixel[1]);
        before -= skipped;
        rest = p.pixel[1] - skipped;
    }

    __device__ __forceinline__ Sums<NARROW> next(const Source& s, const Place& p, const Tiling& tiling, int d)
    {
        Sums<NARROW> sums = {};
        for (u32 missing = p.step[1]; missing;) {
            if (rest == 0)
                go_on(s, p);
            const u32 weight = min(rest, missing);
            sums.add(pairs, weight);
            missing -= weight, rest -= weight;
        }
        return sums;
    }
};

// Output columns of the tile from `left` on: the sample at which their taps begin, from column x0 on, and the weights
// of `tiling.taps` words, `tiling.columns` apart. Four weights a word where NARROW, and taps begin at an even column.
template <Method METHOD, bool NARROW>
__device__ __forceinline__ void make_taps(
    const Place& p, const Tiling& tiling, int left, int x0, int* begins, u32* weights)
{
    const int thread = threadIdx.y * WARP + threadIdx.x, count = min(tiling.columns, p.target[2] - left);
    for (int i = thread; i < count; i += 8 * WARP) {
        const Tap h = inside_tap<METHOD>(p, tiling, 0, left + i);
        const int from = p.source[0] + h.first - x0, odd = NARROW ? from & 1 : 0;
        begins[i] = from - odd;
        for (int k = 0; k < tiling.taps; k++) {
            u32 word = 0;
            if (NARROW) {
                for (int j = 0; j < 4; j++)
                    word |= (4 * k + j < odd ? 0 : weight(p, 0, h, 4 * k + j - odd)) << 8 * j;
            } else {
                word = weight(p, 0, h, k);
            }
            weights[k * tiling.columns + i] = word;
        }
    }
}

// The three sums of an output pixel.
template <bool NARROW>
__device__ __forceinline__ void sum_across(
    const u8* sums, const Tiling& tiling, int begin, const u32* weights, u32 (&sum)[3])
{
    const u32* words = (const u32*)sums + (NARROW ? begin / 2 : begin);
    const int channel = tiling.parts * 256 / (NARROW ? 2 : 1);
#pragma unroll 1
    for (int k = 0; k < tiling.taps; k++, weights += tiling.columns) {
        const u32 w = *weights;
        for (int c = 0; c < 3; c++) {
            if (NARROW) {
                sum[c] = __dp2a_lo(words[c * channel + 2 * k], w, sum[c]);
                sum[c] = __dp2a_hi(words[c * channel + 2 * k + 1], w, sum[c]);
            } else {
                sum[c] += words[c * channel + k] * w;
            }
        }
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

// What is beside the part of the result: 8 rows a block, one a warp.
__device__ __forceinline__ void border(u8* out, const Target& t, const Place& p, int y, u8* row)
{
    const int left = p.target[0], right = left + p.target[2], top = p.target[1], lane = threadIdx.x;
    if (left == 0 && right == t.width && y >= top)
        y += p.target[3];  // rows without a border are not counted
    if (y >= t.height)
        return;
    const bool whole = y < top || y >= top + p.target[3];
    for (int side = 0; side < (whole ? 1 : 2); side++) {
        const int begin = side ? right : 0, end = whole || side ? t.width : left;
        fill(out + y * t.row + (i64)begin * t.column, end - begin, t, p, row, lane);
    }
}

// `count` output pixels from `to` on, a pixel a lane.
template <bool NARROW>
__device__ __forceinline__ void put_run(
    u8* to, const u8* sums, const Target& t, const Tiling& tiling, const int* begins, const u32* weights, int count,
    u8* pixels)
{
    const int lane = threadIdx.x, k = min(lane, count - 1);
    u32 sum[3] = {tiling.half, tiling.half, tiling.half};
    sum_across<NARROW>(sums, tiling, begins[k], weights + k, sum);
    Three rgb;
    for (int c = 0; c < 3; c++)
        rgb.values[c] = (int)(__umulhi(sum[c], tiling.magic) >> tiling.shift);
    if (t.together) {
        if (lane < count)
            put_pixel(pixels + lane * t.column, t, rgb);
        __syncwarp();
        store_row<true>(to, pixels, count * t.column, lane);
        __syncwarp();
    } else if (lane < count) {
        put_pixel(to + lane * t.column, t, rgb);
    }
}

template <Method METHOD, bool NARROW>
__device__ __forceinline__ void resample(
    const u8* in, u8* out, const Source& s, const Target& t, const Place& p, const Tiling& tiling)
{
    extern __shared__ uint4 dynamic[];
    u8* memory = (u8*)dynamic;
    int* begins = (int*)(memory + tiling.begins);
    u32* weights = (u32*)(memory + tiling.weights);
    const int warp = threadIdx.y, lane = threadIdx.x, tile = blockIdx.x;
    u8* pixels = memory + tiling.pixels + warp * ROW_BYTES;
    in += blockIdx.z * s.picture;
    out += blockIdx.z * t.picture;
    if (tile >= tiling.tiles) {
        border(out, t, p, (tile - tiling.tiles) * 8 + warp, pixels);
        return;
    }
    const int groups = 8 / tiling.parts, deep = tiling.rows;
    const int left = tile % tiling.across * tiling.columns, top = tile / tiling.across * groups * deep;
    const int columns = min(tiling.columns, p.target[2] - left), height = p.target[3];
    const Tap begin = inside_tap<METHOD>(p, tiling, 0, left), last = inside_tap<METHOD>(p, tiling, 0, left + columns - 1);
    const int x0 = (p.source[0] + begin.first) & ~7;
    const int end = p.source[0] + last.first + touched_inside<METHOD>(p, 0, last);
    const int channel = tiling.parts * 256 * (NARROW ? 2 : 4), runs = (columns + WARP - 1) / WARP;
    make_taps<METHOD, NARROW>(p, tiling, left, x0, begins, weights);
    const int i = (warp % tiling.parts * WARP + lane) * 8, group = warp / tiling.parts, first = top + group * deep;
    const bool busy = x0 + i < end && first < height;
    Down<METHOD, NARROW> down(in, s, p, tiling, busy ? x0 + i : x0, min(first, height - 1), min(first + deep, height));
    out += (p.target[1] + top) * t.row + (i64)(p.target[0] + left) * t.column;
    const int run_0 = warp % runs, group_0 = warp / runs, more_runs = 8 % runs, more_groups = 8 / runs;
    for (int k = 0; k < deep; k++) {
        if (busy && first + k < height)
            down.next(s, p, tiling, first + k)
                .store(memory + group * 3 * channel + i * (NARROW ? 2 : 4), channel);
        __syncthreads();
        for (int g = group_0, run = run_0; g < groups; g += more_groups, run += more_runs) {
            if (run >= runs)
                run -= runs, g++;
            const int row = g * deep + k, x = run * WARP;
            if (g < groups && top + row < height)
                put_run<NARROW>(
                    out + row * t.row + x * t.column, memory + g * 3 * channel, t, tiling, begins + x, weights + x,
                    min(WARP, columns - x), pixels);
        }
        __syncthreads();
    }
}

#define KERNEL(NAME, METHOD, NARROW)                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 3) NAME(const u8* in, u8* out, TiledJob job)    \
    {                                                                                                 \
        resample<METHOD, NARROW>(in, out, job.source, job.target, job.place, job.tiling);             \
    }

KERNEL(area_narrow, AREA, true)
KERNEL(area_wide, AREA, false)
KERNEL(bilinear_narrow, BILINEAR, true)
KERNEL(bilinear_wide, BILINEAR, false)

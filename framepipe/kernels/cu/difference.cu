// What differs from a learnt background; framepipe/kernels/_difference.py has the definition, whose steps are named
// here. One picture takes three launches: the shrunk picture F and the ratios of step 2; steps 2 and 3 with the count
// that tells a cut; steps 4 to 6. `scratch` holds a bin for every ratio and the number of changed pixels, all zero at
// first, then F and then B as the last launch finds it. Blocks are of 32 x 8 pixels of the shrunk picture.

const int BINS = 512, COUNTS = BINS + 1, CELL = 4;

__device__ __forceinline__ u16* shrunk_picture(u32* scratch) { return (u16*)(scratch + COUNTS); }
__device__ __forceinline__ u16* former_background(u32* scratch, const Scene& s)
{
    return shrunk_picture(scratch) + s.width * s.height;
}

struct Layer {
    u8* memory;
    const Scene* scene;

    // The uint16 of plane `p` at (x, y).
    __device__ __forceinline__ u16& at(int p, int x, int y) const
    {
        return *(u16*)(memory + p * scene->state_plane + (i64)y * scene->state_row + x * scene->state_column);
    }
};

enum Plane { BACKGROUND, BEFORE, CANDIDATE, AGE };

__device__ __forceinline__ int apart(int a, int b) { return abs(a - b); }

__device__ __forceinline__ void begin_anew(const Layer& state, u8* mask, const Scene& s, int x, int y, int now)
{
    state.at(BACKGROUND, x, y) = state.at(BEFORE, x, y) = state.at(CANDIDATE, x, y) = (u16)now;
    state.at(AGE, x, y) = 0;
    if (x % CELL == 0 && y % CELL == 0)
        mask[(i64)(y / CELL) * s.mask_row + x / CELL * s.mask_column] = 0;
}

template <class T>
__device__ __forceinline__ u32 shrunk(const u8* in, const Scene& s, int c, int x, int y)
{
    const int side = 1 << s.shrink_bits;
    const u8* corner = in + (i64)(y * side) * s.row[c] + (i64)(x * side) * s.column[c];
    u32 sum = 0;
    for (int j = 0; j < side; j++)
        for (int i = 0; i < side; i++)
            sum += __ldg((const T*)(corner + (i64)j * s.row[c] + i * s.column[c]));
    const int down = 2 * s.shrink_bits + s.extra_bits - 8;
    return down < 0 ? sum << -down : sum >> down;
}

// Adds 1 for each sampled pixel of the block to the bin of its ratio: equal ones, which most are, at once.
__device__ __forceinline__ void count_ratios(u32* counts, bool sampled, u32 ratio)
{
    __shared__ u32 ratios[16];
    const int place = threadIdx.y / CELL * 8 + threadIdx.x / CELL;
    if (threadIdx.y == 0 && threadIdx.x < 16)
        ratios[threadIdx.x] = BINS;
    __syncthreads();
    if (sampled)
        ratios[place] = ratio;
    __syncthreads();
    if (!sampled)
        return;
    int same = 0, earlier = 0;
    for (int i = 0; i < 16; i++) {
        same += ratios[i] == ratio;
        earlier += i < place && ratios[i] == ratio;
    }
    if (!earlier)
        atomicAdd(counts + ratio, same);
}

// Step 1, and the ratios of step 2.
template <class T>
__device__ __forceinline__ void luma(
    const u8* a, const u8* b, const u8* c, u8* memory, u8* mask, u32* scratch, const Scene& s, int first)
{
    const int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 8 + threadIdx.y;
    const Layer state = {memory, &s};
    const bool inside = x < s.width && y < s.height;
    u32 now = 0;
    if (inside) {
        now = shrunk<T>(a, s, 0, x, y);
        if (s.channels == 3)
            now = (77 * now + 150 * shrunk<T>(b, s, 1, x, y) + 29 * shrunk<T>(c, s, 2, x, y)) >> 8;
        if (first)
            begin_anew(state, mask, s, x, y, now);
        else
            shrunk_picture(scratch)[y * s.width + x] = (u16)now;
    }
    if (first)
        return;
    const bool sampled = inside && x % 4 == 2 && y % 4 == 2;
    u32 ratio = 0;
    if (sampled)
        ratio = min((now << 8) / max((u32)state.at(BACKGROUND, x, y), 2048u), BINS - 1u);
    count_ratios(scratch, sampled, ratio);
}

#define LUMA(NAME, T)                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                            \
        const u8* a, const u8* b, const u8* c, u8* state, u8* mask, u32* scratch, Scene s, int first)  \
    {                                                                                                  \
        luma<T>(a, b, c, state, mask, scratch, s, first);                                              \
    }

LUMA(difference_luma_8, u8)
LUMA(difference_luma_16, u16)

// The gain of step 2, or 256 where the light did not change: every block finds it for itself.
__device__ __forceinline__ int gain_of(const u32* counts, const Scene& s)
{
    __shared__ u32 upto[BINS];  // how many ratios are at most the index
    __shared__ int gain;
    const int thread = threadIdx.y * 32 + threadIdx.x;
    const u32 low = counts[2 * thread], high = counts[2 * thread + 1];
    u32 sum = low + high;
    if (thread == 0)
        gain = BINS;
    upto[thread] = sum;
    for (int back = 1; back < 256; back *= 2) {
        __syncthreads();
        const u32 more = thread >= back ? upto[thread - back] : 0;
        __syncthreads();
        upto[thread] = sum += more;
    }
    __syncthreads();
    upto[2 * thread] = sum - high;
    upto[2 * thread + 1] = sum;
    __syncthreads();
    const u32 half = (u32)s.samples / 2, before = sum - high - low;
    if (before <= half && sum > half)
        gain = sum - high > half ? 2 * thread : 2 * thread + 1;
    __syncthreads();
    const u32 near = upto[min(gain + 16, BINS - 1)] - (gain > 16 ? upto[min(gain - 17, BINS - 1)] : 0);
    return abs(gain - 256) >= 3 && near > half ? gain : 256;
}

// The rest of step 2, and step 3 up to what changed, which is then where |F - B| > T. B goes to the scratch too, for
// the neighbours in the next launch, in which it changes.
extern "C" __global__ void __launch_bounds__(256) difference_change(u8* memory, u32* scratch, Scene s, int threshold)
{
    const int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 8 + threadIdx.y;
    const int gain = gain_of(scratch, s);
    bool changed = false;
    if (x < s.width && y < s.height) {
        const Layer state = {memory, &s};
        const int now = shrunk_picture(scratch)[y * s.width + x];
        u32 values[3];
        for (int p = 0; p < 3; p++) {
            values[p] = state.at(p, x, y);
            if (gain != 256)
                values[p] = min(values[p] * gain >> 8, 65535u);
        }
        changed = apart(now, values[BACKGROUND]) > threshold;
        if (changed && apart(now, values[BEFORE]) <= threshold) {
            const u32 known = values[BEFORE];
            values[BEFORE] = values[BACKGROUND], values[BACKGROUND] = known;
            changed = false;
        }
        for (int p = 0; p < 3; p++)
            state.at(p, x, y) = (u16)values[p];
        former_background(scratch, s)[y * s.width + x] = (u16)values[BACKGROUND];
    }
    const int found = __syncthreads_count(changed);
    if (found && threadIdx.x == 0 && threadIdx.y == 0)
        atomicAdd(scratch + BINS, found);
}

// Whether F is more than T outside the range of B around (x, y).
__device__ __forceinline__ bool stands_out(const u16* former, const Scene& s, int x, int y, int now, int threshold)
{
    int low = 65535, high = 0;
    for (int j = max(y - 1, 0); j <= min(y + 1, s.height - 1); j++)
        for (int i = max(x - 1, 0); i <= min(x + 1, s.width - 1); i++) {
            const int value = former[j * s.width + i];
            low = min(low, value), high = max(high, value);
        }
    return now - high > threshold || low - now > threshold;
}

// Steps 5 and 6 for one pixel.
__device__ __forceinline__ void learn(
    const Layer& state, int x, int y, int now, bool changed, bool outside, int threshold, int slow, int hold)
{
    int background = state.at(BACKGROUND, x, y), age = 0;
    if (!outside)
        background += ((now >> 1) - (background >> 1)) >> (changed ? slow + 1 : slow - 1);
    if (changed) {
        age = state.at(AGE, x, y);
        if (age > 0 && apart(now, state.at(CANDIDATE, x, y)) <= threshold) {
            age = min(age + 1, 65535);
        } else {
            state.at(CANDIDATE, x, y) = (u16)now;
            age = 1;
        }
        if (age >= hold) {
            state.at(BEFORE, x, y) = (u16)background;
            background = now;
            age = 0;
        }
    }
    state.at(BACKGROUND, x, y) = (u16)background;
    state.at(AGE, x, y) = (u16)age;
}

// Steps 4 to 6, or the beginning anew of a cut.
extern "C" __global__ void __launch_bounds__(256) difference_learn(
    u8* memory, u8* mask, u32* scratch, Scene s, int threshold, i64 limit, int slow, int hold)
{
    __shared__ u32 cells[16];  // changed pixels, and above 16 bits those that stand out
    const int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 8 + threadIdx.y;
    const int thread = threadIdx.y * 32 + threadIdx.x;
    const bool inside = x < s.width && y < s.height;
    const Layer state = {memory, &s};
    const u16* former = former_background(scratch, s);
    const int now = inside ? shrunk_picture(scratch)[y * s.width + x] : 0;
    if (scratch[BINS] > limit) {
        if (inside)
            begin_anew(state, mask, s, x, y, now);
        return;
    }
    if (thread < 16)
        cells[thread] = 0;
    __syncthreads();
    if (inside) {
        const bool changed = apart(now, former[y * s.width + x]) > threshold;
        const bool outside = changed && stands_out(former, s, x, y, now, threshold);
        if (changed)
            atomicAdd(cells + threadIdx.y / CELL * 8 + threadIdx.x / CELL, outside ? 0x10001 : 1);
        learn(state, x, y, now, changed, outside, threshold, slow, hold);
    }
    __syncthreads();
    const int cell_x = blockIdx.x * 8 + thread % 8, cell_y = blockIdx.y * 2 + thread / 8;
    if (thread < 16 && cell_x * CELL < s.width && cell_y * CELL < s.height)
        mask[(i64)cell_y * s.mask_row + cell_x * s.mask_column] =
            (u8)(min(cells[thread] & 0xffff, 15u) | min(cells[thread] >> 16, 15u) << 4);
}

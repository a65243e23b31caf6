// Sum, minimum and maximum of each channel of pictures, to int64.

extern "C" __global__ void stats_begin(u8* out, Sums o)
{
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= o.pictures * o.channels)
        return;
    u8* at = out + n / o.channels * o.picture + n % o.channels * o.channel;
    *(i64*)at = 0;
    *(i64*)(at + o.column) = 1 << 16;
    *(i64*)(at + 2 * o.column) = -1;
}

template <class T, int CHANNELS>
__device__ __forceinline__ void stats(const u8* in, u8* out, const Samples& s, const Sums& o)
{
    __shared__ u64 sums[CHANNELS][8];
    __shared__ int lows[CHANNELS][8], highs[CHANNELS][8];
    in += blockIdx.z * s.picture;
    u64 sum[CHANNELS];
    int low[CHANNELS], high[CHANNELS];
    for (int c = 0; c < CHANNELS; c++)
        sum[c] = 0, low[c] = 1 << 16, high[c] = -1;
    for (int y = blockIdx.x; y < s.height; y += gridDim.x) {
        const u8* row = in + (i64)y * s.row;
#pragma unroll 4
        for (int x = threadIdx.x; x < s.width; x += 256)
            for (int c = 0; c < CHANNELS; c++) {
                const int value = __ldg((const T*)(row + (i64)x * s.column + c * s.channel));
                sum[c] += value, low[c] = min(low[c], value), high[c] = max(high[c], value);
            }
    }
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (int c = 0; c < CHANNELS; c++) {
        for (int apart = WARP / 2; apart; apart /= 2) {
            sum[c] += __shfl_xor_sync(ALL_LANES, sum[c], apart);
            low[c] = min(low[c], __shfl_xor_sync(ALL_LANES, low[c], apart));
            high[c] = max(high[c], __shfl_xor_sync(ALL_LANES, high[c], apart));
        }
        if (lane == 0)
            sums[c][warp] = sum[c], lows[c][warp] = low[c], highs[c][warp] = high[c];
    }
    __syncthreads();
    const int c = threadIdx.x;
    if (c >= CHANNELS)
        return;
    for (int w = 1; w < 8; w++) {
        sums[c][0] += sums[c][w];
        lows[c][0] = min(lows[c][0], lows[c][w]), highs[c][0] = max(highs[c][0], highs[c][w]);
    }
    u8* at = out + blockIdx.z * o.picture + c * o.channel;
    atomicAdd((u64*)at, sums[c][0]);
    atomicMin((i64*)(at + o.column), (i64)lows[c][0]);
    atomicMax((i64*)(at + 2 * o.column), (i64)highs[c][0]);
}

#define STATS(NAME, T, CHANNELS)                                                                          \
    extern "C" __global__ void __launch_bounds__(256) NAME(const u8* in, u8* out, Samples s, Sums o)      \
    {                                                                                                     \
        stats<T, CHANNELS>(in, out, s, o);                                                                \
    }

STATS(stats_rgb, u8, 3)
STATS(stats_8, u8, 1)
STATS(stats_16, u16, 1)

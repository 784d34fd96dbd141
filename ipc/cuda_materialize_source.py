"""The kernel of `ipc.materialize_cuda`, as CUDA C++, and the layout of what it is passed."""

from __future__ import annotations

MAX_SLICES = 127  # as many rows as fit into the 4 KB that a launch is passed by value
THREADS = 512
GROUPS_PER_THREAD = 2
GROUPS_PER_TILE = THREADS * GROUPS_PER_THREAD
GROUP_BYTES = 16  # one store

KINDS = {"uint8": 0, "float16": 1, "bfloat16": 2, "float32": 3}
"""How the kernel names the dtypes of slices."""

ROW_FORMAT = "QQqii"
ROW_VALUES = len(ROW_FORMAT)
HEADER_FORMAT = "=ii"
TABLE_BYTES = 8 + 32 * MAX_SLICES
"""`struct Row` and `struct Table` for the struct module: the number of slices and padding, then the rows."""

# A block writes one tile of one slice: GROUPS_PER_TILE groups, each one aligned 16-byte store of the output. All loads
# of a thread are issued before its first store. Groups that reach over the ends of a slice are done value by value.
# OUTPUT, the kind that is written, and KERNEL, the function's name, are defined in front.
SOURCE = (
    f"constexpr int MAX_SLICES = {MAX_SLICES}, THREADS = {THREADS}, UNROLL = {GROUPS_PER_THREAD};\n"
    r"""
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

enum Kind { UINT8, FLOAT16, BFLOAT16, FLOAT32 };

struct Row {
    u64 source, target;  // addresses of the first value
    long long length;    // in values, not 0
    int first_tile;      // ascending, from 0
    int kind;
};

struct Table {
    int num_slices, padding;
    Row rows[MAX_SLICES];
};

__host__ __device__ constexpr int size_of(int kind) { return kind == UINT8 ? 1 : kind == FLOAT32 ? 4 : 2; }

// The rounding and the NaNs are those of the instructions that torch converts with.
template <int KIND> __device__ float to_float(u32 bits) {
    if constexpr (KIND == UINT8) return float(bits);
    if constexpr (KIND == BFLOAT16) return __uint_as_float(bits << 16);
    if constexpr (KIND == FLOAT32) return __uint_as_float(bits);
    float value;
    asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(value) : "r"(bits));
    return value;
}

template <int KIND> __device__ u32 from_float(float value) {
    if constexpr (KIND == FLOAT32) return __float_as_uint(value);
    u16 bits;
    if constexpr (KIND == FLOAT16) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    if constexpr (KIND == BFLOAT16) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

template <int FROM, int TO> __device__ u32 convert(u32 bits) {
    if constexpr (FROM == TO) return bits;
    return from_float<TO>(to_float<FROM>(bits));
}

// Value `index` of packed words.
template <int KIND> __device__ u32 value_of(const u32* words, int index) {
    if constexpr (KIND == UINT8) return words[index / 4] >> index % 4 * 8 & 0xff;
    if constexpr (KIND == FLOAT32) return words[index];
    return words[index / 2] >> index % 2 * 16 & 0xffff;
}

// WORDS words from `source`; IS_ALIGNED: to a multiple of their size, 16 bytes at most. Otherwise whole aligned words
// are loaded, the last only if some of it is wanted, and shifted.
template <bool IS_ALIGNED, int WORDS> __device__ void load(const u8* source, u32* words) {
    if constexpr (!IS_ALIGNED) {
        u32 shift = u32(reinterpret_cast<u64>(source) % 4);
        const u32* pieces = reinterpret_cast<const u32*>(source - shift);
        u32 low = __ldg(pieces);
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            u32 high = i < WORDS - 1 || shift ? __ldg(pieces + i + 1) : 0;
            words[i] = __funnelshift_r(low, high, shift * 8);
            low = high;
        }
    } else if constexpr (WORDS >= 4) {
#pragma unroll
        for (int i = 0; i < WORDS; i += 4) {
            uint4 piece = __ldg(reinterpret_cast<const uint4*>(source + i * 4));
            words[i] = piece.x, words[i + 1] = piece.y, words[i + 2] = piece.z, words[i + 3] = piece.w;
        }
    } else if constexpr (WORDS == 2) {
        uint2 piece = __ldg(reinterpret_cast<const uint2*>(source));
        words[0] = piece.x, words[1] = piece.y;
    } else {
        words[0] = __ldg(reinterpret_cast<const u32*>(source));
    }
}

template <int FROM, int TO>
__device__ __noinline__ void some_values(const u8* source, u8* target, long long start, long long end) {
    for (long long index = start; index < end; index++) {
        u32 bits = 0;
#pragma unroll
        for (int byte = 0; byte < size_of(FROM); byte++) bits |= u32(source[index * size_of(FROM) + byte]) << byte * 8;
        u32 value = convert<FROM, TO>(bits);
        if constexpr (TO == FLOAT32) reinterpret_cast<u32*>(target)[index] = value;
        else reinterpret_cast<u16*>(target)[index] = u16(value);
    }
}

// Groups are counted from the 16-byte boundary at or before the target; `skew` values of the first lie before it.
template <int FROM, int TO, bool IS_ALIGNED>
__device__ void tile(const u8* source, u8* target, long long length, int skew, long long first_group) {
    constexpr int VALUES = 16 / size_of(TO), WORDS = VALUES * size_of(FROM) / 4;
    u32 words[UNROLL][WORDS];
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        long long start = (first_group + i * THREADS + threadIdx.x) * VALUES - skew;
        if (start >= 0 && start + VALUES <= length) load<IS_ALIGNED, WORDS>(source + start * size_of(FROM), words[i]);
    }
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        long long start = (first_group + i * THREADS + threadIdx.x) * VALUES - skew;
        if (start >= 0 && start + VALUES <= length) {
            u32 result[4];
#pragma unroll
            for (int word = 0; word < 4; word++) {
                if constexpr (TO == FLOAT32) result[word] = convert<FROM, TO>(value_of<FROM>(words[i], word));
                else result[word] = convert<FROM, TO>(value_of<FROM>(words[i], 2 * word))
                                  | convert<FROM, TO>(value_of<FROM>(words[i], 2 * word + 1)) << 16;
            }
            *reinterpret_cast<uint4*>(target + start * size_of(TO)) =
                make_uint4(result[0], result[1], result[2], result[3]);
        } else {
            long long end = start + VALUES < length ? start + VALUES : length;
            some_values<FROM, TO>(source, target, start < 0 ? 0 : start, end);
        }
    }
}

template <int FROM, int TO>
__device__ void aligned_tile(const u8* source, u8* target, long long length, long long first_group) {
    constexpr int GROUP = 16 / size_of(TO) * size_of(FROM);
    int skew = int(reinterpret_cast<u64>(target) % 16) / size_of(TO);
    u64 start = reinterpret_cast<u64>(source) - skew * size_of(FROM);
    if (start % (GROUP < 16 ? GROUP : 16) == 0) tile<FROM, TO, true>(source, target, length, skew, first_group);
    else tile<FROM, TO, false>(source, target, length, skew, first_group);
}

template <int TO> __device__ void materialize(const Table& table) {
    int slice = 0, end = table.num_slices;
    while (end - slice > 1) {
        int middle = (slice + end) / 2;
        if (table.rows[middle].first_tile <= int(blockIdx.x)) slice = middle;
        else end = middle;
    }
    const Row& row = table.rows[slice];
    const u8* source = reinterpret_cast<const u8*>(row.source);
    u8* target = reinterpret_cast<u8*>(row.target);
    long long length = row.length;
    long long first_group = (long long)(blockIdx.x - row.first_tile) * (THREADS * UNROLL);
    switch (row.kind) {
        case UINT8: return aligned_tile<UINT8, TO>(source, target, length, first_group);
        case FLOAT16: return aligned_tile<FLOAT16, TO>(source, target, length, first_group);
        case BFLOAT16: return aligned_tile<BFLOAT16, TO>(source, target, length, first_group);
        default: return aligned_tile<FLOAT32, TO>(source, target, length, first_group);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Table table) {
    materialize<OUTPUT>(table);
}
"""
)

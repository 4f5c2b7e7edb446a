// Products with weights in oneDNN's order for AVX-512: few rows at the speed at which the memory gives the weights.
//
// That order is [out / 64, in / group, 64, group] with groups of 4 bytes, filled up with zeros. Each output of each row
// is one chain of `vpdpbusd` or `vdpbf16ps` along the inputs, however many rows there are, so its bits depend on nothing
// else. Weights are read once; what the next rows need of them is in the first cache then, and while the rows compute
// they ask for the next block. Inputs are first laid out in the order in which they are read, and made integers on the
// way: many rows are read again for each 64 outputs, which no cache would guess from where they were.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace {

constexpr int LANES = 16;
constexpr int VECTORS = 4;
constexpr int TILE = LANES * VECTORS;  // outputs
constexpr int ROWS = 6;                // rows at once: 6 x 4 accumulators
constexpr int BLOCK = 32;              // groups of inputs that stay in the first cache while all rows use them
constexpr int MOST = 96;               // rows that go through a tile before the next one
constexpr int LINE = 4 * BLOCK;        // bytes of a row in a block

struct Job {
    const uint16_t* x;      // [rows, in] bfloat16
    const int32_t* weight;
    const float* scale;     // [out] of integers; unused in bfloat16
    const int32_t* sums;    // [out] of the integers of a weight; unused in bfloat16
    const float* bias;      // [out] or null
    uint16_t* result;       // [rows, out] bfloat16
    void* panels;           // room for [rows, in filled up to whole blocks] of inputs; or null: bfloat16 as it is
    float* steps;           // room for [rows] of integers; unused in bfloat16
    int32_t rows, in, out;
    int32_t packed;         // inputs of a weight, filled up
    int32_t threads;
};

// Sixteen outputs of a row, in bfloat16.
void keep(const Job& job, int row, int first, __mmask16 there, __m512 value) {
    if (job.bias) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(there, job.bias + first));
    _mm256_mask_storeu_epi16(job.result + (int64_t)row * job.out + first, there, (__m256i)_mm512_cvtneps_pbh(value));
}

struct Integers {
    using Sum = __m512i;
    static constexpr int GROUP = 4;
    using Input = uint8_t;
    static Sum nothing() { return _mm512_setzero_si512(); }
    static Sum load(const int32_t* at) { return _mm512_load_si512(at); }
    static void store(int32_t* at, Sum sum) { _mm512_store_si512(at, sum); }
    // Its intrinsic makes GCC copy each sum back and forth (seen in version 12).
    static Sum add(Sum sum, __m512i x, __m512i weight) {
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(weight));
        return sum;
    }

    // A row as integers around 128, and the value of a step: its largest magnitude over 127.
    static void prepare(const Job& job, const uint16_t* x, int row, char* to, int64_t stride) {
        const __m512i magnitude = _mm512_set1_epi16(0x7fff);
        __m512i most = _mm512_setzero_si512();  // as integers magnitudes have the order of their values, and NaN is most
        for (int first = 0; first < job.in; first += 2 * LANES) {
            const int left = std::min(2 * LANES, job.in - first);
            const __m512i part = _mm512_maskz_loadu_epi16((__mmask32)((1ull << left) - 1), x + first);
            most = _mm512_max_epu16(most, _mm512_and_si512(part, magnitude));
        }
        alignas(64) uint16_t largest[2 * LANES];
        _mm512_store_si512(largest, most);
        const uint32_t bits = (uint32_t)*std::max_element(largest, largest + 2 * LANES) << 16;
        float step;
        __builtin_memcpy(&step, &bits, sizeof step);
        step /= 127;
        job.steps[row] = step;
        const __m512 steps = _mm512_set1_ps(step), middle = _mm512_set1_ps(128.5f);
        for (int first = 0; first < job.in; first += LANES) {
            const int left = std::min(LANES, job.in - first);
            const auto there = (__mmask16)((1u << left) - 1);
            const __m512i raw = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, x + first));
            const __m512 value = _mm512_castsi512_ps(_mm512_slli_epi32(raw, 16));
            const __m512i level = _mm512_cvttps_epi32(_mm512_add_ps(_mm512_div_ps(value, steps), middle));
            _mm_mask_storeu_epi8(to + first / LINE * stride + first % LINE, there, _mm512_cvtepi32_epi8(level));
        }
    }

    static void finish(const Job& job, int row, int first, __mmask16 there, Sum sum) {
        const __m512i zero = _mm512_slli_epi32(_mm512_maskz_loadu_epi32(there, job.sums + first), 7);
        const __m512 value = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, zero));
        const __m512 scale = _mm512_maskz_loadu_ps(there, job.scale + first);
        keep(job, row, first, there, _mm512_mul_ps(_mm512_mul_ps(value, scale), _mm512_set1_ps(job.steps[row])));
    }
};

struct Floats {
    using Sum = __m512;
    static constexpr int GROUP = 2;
    using Input = uint16_t;
    static Sum nothing() { return _mm512_setzero_ps(); }
    static Sum load(const int32_t* at) { return _mm512_load_ps(at); }
    static void store(int32_t* at, Sum sum) { _mm512_store_ps(at, sum); }
    static Sum add(Sum sum, __m512i x, __m512i weight) {
        return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)weight);
    }

    static void prepare(const Job& job, const uint16_t* x, int, char* to, int64_t stride) {
        constexpr int WIDTH = BLOCK * GROUP;
        for (int first = 0; first < job.in; first += WIDTH, to += stride)
            __builtin_memcpy(to, x + first, sizeof *x * std::min(WIDTH, job.in - first));
    }

    static void finish(const Job& job, int row, int first, __mmask16 there, Sum sum) {
        keep(job, row, first, there, sum);
    }
};

#define INLINE __attribute__((always_inline))

// Calls `body` with 0, 1, ... as constants, so that compilers keep arrays that it indexes in registers.
template <int N, class Body>
INLINE inline void repeat(const Body& body) {
    if constexpr (N > 0) {
        repeat<N - 1>(body);
        body(std::integral_constant<int, N - 1>());
    }
}

// Adds `groups` groups of inputs of M rows to their sums [M, TILE], and asks for a part of the next block's weights.
template <class Kind, int M>
inline void add(const typename Kind::Input* x, int64_t stride, const int32_t* weight, int groups, bool fresh,
                const char* next, int lines, int32_t* sums) {
    typename Kind::Sum held[M * VECTORS];
    repeat<M * VECTORS>([&](auto i) INLINE {
        held[i] = fresh ? Kind::nothing() : Kind::load(sums + i * LANES);
    });
    for (int group = 0; group < groups; ++group, weight += TILE) {
        __m512i right[VECTORS];
        repeat<VECTORS>([&](auto n) INLINE {
            right[n] = _mm512_loadu_si512(weight + n * LANES);
        });
        for (int line = 0; line < lines; ++line, next += 64) _mm_prefetch(next, _MM_HINT_T0);
        repeat<M>([&](auto m) INLINE {
            const __m512i left = _mm512_set1_epi32(*(const int32_t*)(x + m * stride + group * Kind::GROUP));
            repeat<VECTORS>([&](auto n) INLINE {
                constexpr int i = decltype(m)::value * VECTORS + decltype(n)::value;
                held[i] = Kind::add(held[i], left, right[n]);
            });
        });
    }
    repeat<M * VECTORS>([&](auto i) INLINE { Kind::store(sums + i * LANES, held[i]); });
}

// Where the rows from `low` on are laid out, as [block of inputs, row, LINE].
template <class Kind>
char* panel(const Job& job, int low) {
    constexpr int WIDTH = BLOCK * Kind::GROUP;
    return (char*)job.panels + (int64_t)low * ((job.in + WIDTH - 1) / WIDTH) * LINE;
}

template <class Kind>
void tile(const Job& job, int first, int low, int high) {
    using Input = typename Kind::Input;
    constexpr int WIDTH = BLOCK * Kind::GROUP;
    alignas(64) int32_t sums[MOST * TILE];
    const int rows = high - low;
    const Input* x = (const Input*)(job.panels ? panel<Kind>(job, low) : (const char*)(job.x + (int64_t)low * job.in));
    const int64_t stride = job.panels ? WIDTH : job.in, step = job.panels ? (int64_t)rows * WIDTH : WIDTH;
    const int groups = job.in / Kind::GROUP;
    const int32_t* weight = job.weight + (int64_t)first * (job.packed / Kind::GROUP);
    // While rows use a block, together they ask for the next one: each part of them for some of the lines of a group.
    const int parts = (rows + ROWS - 1) / ROWS, lines = (VECTORS + parts - 1) / parts;
    for (int start = 0; start < groups; start += BLOCK, x += step) {
        const int count = std::min(BLOCK, groups - start);
        const char* next = (const char*)(weight + (int64_t)(start + count) * TILE);
        for (int row = 0; row < rows; row += ROWS) {
            const int asked = row / ROWS * lines, ask = asked < VECTORS ? lines : 0;
            const Input* from = x + row * stride;
            const int32_t* right = weight + (int64_t)start * TILE;
            int32_t* to = sums + row * TILE;
            switch (std::min(ROWS, rows - row)) {
                case 1: add<Kind, 1>(from, stride, right, count, start == 0, next + asked * count * 64, ask, to); break;
                case 2: add<Kind, 2>(from, stride, right, count, start == 0, next + asked * count * 64, ask, to); break;
                case 3: add<Kind, 3>(from, stride, right, count, start == 0, next + asked * count * 64, ask, to); break;
                case 4: add<Kind, 4>(from, stride, right, count, start == 0, next + asked * count * 64, ask, to); break;
                case 5: add<Kind, 5>(from, stride, right, count, start == 0, next + asked * count * 64, ask, to); break;
                default: add<Kind, ROWS>(from, stride, right, count, start == 0, next + asked * count * 64, ask, to);
            }
        }
    }
    for (int row = 0; row < rows; ++row)
        for (int n = 0; n < VECTORS; ++n) {
            const int left = std::clamp(job.out - first - n * LANES, 0, LANES);
            if (left)
                Kind::finish(job, low + row, first + n * LANES, (__mmask16)((1u << left) - 1),
                             Kind::load(sums + row * TILE + n * LANES));
        }
}

template <class Kind>
void multiply(const Job& job) {
    const int tiles = (job.out + TILE - 1) / TILE;
    // Always as many threads as torch has: its pool forgets those that it can do without, and makes them anew.
#pragma omp parallel num_threads(job.threads) if (tiles > 1)
    {
#pragma omp for schedule(static)
        for (int row = 0; row < (job.panels ? job.rows : 0); ++row) {
            const int low = row / MOST * MOST, rows = std::min(MOST, job.rows - low);
            char* to = panel<Kind>(job, low) + (row - low) * LINE;
            Kind::prepare(job, job.x + (int64_t)row * job.in, row, to, (int64_t)rows * LINE);
        }
#pragma omp for schedule(static) nowait
        for (int index = 0; index < tiles; ++index)
            for (int row = 0; row < job.rows; row += MOST)
                tile<Kind>(job, index * TILE, row, std::min(row + MOST, job.rows));
    }
}

}  // namespace

extern "C" void bozza_multiply_integers(const Job* job) { multiply<Integers>(*job); }
extern "C" void bozza_multiply_floats(const Job* job) { multiply<Floats>(*job); }

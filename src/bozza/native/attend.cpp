// Attention of one ragged pass in bfloat16: rows of different requests, lengths and shapes, in one call.
//
// Each token reads its keys in the order of positions, in blocks of BLOCK that begin at position 0, with the online
// softmax of Milakov and Gimelshein (2018), as in FlashAttention (Dao et al. 2022, Algorithm 1). What is computed for a
// row of a block depends on nothing but that row and that block: rows share packed keys and loops, never an
// accumulator, and a block that a row does not see leaves it as it was. So a token gets the same bits alone, in a block
// of drafted tokens, on any branch of a tree, in a batch and in a long prompt; as long as values are finite, since what
// is not seen has weight 0, and 0 times infinity is no number.
//
// Scores and sums are in float32; weights are rounded to bfloat16 before they meet the values, and their sum is that of
// the rounded ones.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>

namespace {

constexpr int BLOCK = 64;                   // keys of a block
constexpr int LANES = 16;                   // floats of a vector
constexpr int VECTORS = BLOCK / LANES;      // of a row of scores
constexpr int ROWS = 6;                     // rows that a product computes at once: 6 x 4 accumulators
constexpr int WIDEST = 512;                 // elements of a head
constexpr float NOTHING = -1e30f;           // the largest score of a row that has seen no key; finite, so that 0 * it is 0
const uint16_t ZEROS[WIDEST] = {};

// Tokens of one slot for which keys are read together.
struct Tile {
    int32_t slot;    // where the slot begins, in tokens
    int32_t first;   // first token, in the pass
    int32_t count;   // tokens
    int32_t shared;  // leading keys that are at their positions for all tokens; a multiple of BLOCK unless all are
    int32_t order;   // where places of the other keys of the first token begin in `orders`; -1: all are shared
};

// What all layers of a pass have in common.
struct Plan {
    const Tile* tiles;
    const int32_t* places;  // [tokens] where in the store a token goes
    const int32_t* low;     // [tokens] first position that it sees
    const int32_t* high;    // [tokens] its own position + 1
    const int32_t* orders;  // [tokens of trees, depth]: places in the slot of the keys that are not shared
    int32_t tile_count;
    int32_t tokens;
    int32_t depth;
    int32_t threads;
};

// Tensors of one layer. Strides are in elements; the last dimension is dense.
struct Layer {
    const uint16_t* query;  // [heads, tokens, size]
    const uint16_t* key;    // [kv heads, tokens, size]
    const uint16_t* value;  // [kv heads, tokens, value size]
    uint16_t* keys;         // the store [places, kv heads, size]
    uint16_t* values;       // the store [places, kv heads, value size]
    uint16_t* out;          // [tokens, heads, value size]
    int64_t query_head, query_token, key_head, key_token, value_head, value_token;
    int32_t heads, kv_heads, size, value_size;
    float scale;
};

inline __m512bh as_pairs(__m512i bits) { return (__m512bh)bits; }

// C[M][N * LANES] = A[M][2 * pairs] * B[pairs][N * LANES] of pairs; added to `factor` * C if there is one.
template <int M, int N>
inline void multiply(const uint16_t* a, int a_stride, const int32_t* b, int b_stride, int pairs, float* c, int c_stride,
                     const float* factor) {
    __m512 sums[M][N];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) sums[m][n] = _mm512_setzero_ps();
    for (int pair = 0; pair < pairs; ++pair) {
        __m512bh right[N];
        for (int n = 0; n < N; ++n) right[n] = as_pairs(_mm512_load_si512(b + pair * b_stride + n * LANES));
        for (int m = 0; m < M; ++m) {
            const __m512bh left = as_pairs(_mm512_set1_epi32(*(const int32_t*)(a + m * a_stride + 2 * pair)));
            for (int n = 0; n < N; ++n) sums[m][n] = _mm512_dpbf16_ps(sums[m][n], left, right[n]);
        }
    }
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) {
            float* place = c + m * c_stride + n * LANES;
            if (factor) sums[m][n] = _mm512_fmadd_ps(_mm512_load_ps(place), _mm512_set1_ps(factor[m]), sums[m][n]);
            _mm512_store_ps(place, sums[m][n]);
        }
}

template <int N>
void multiply(int rows, const uint16_t* a, int a_stride, const int32_t* b, int b_stride, int pairs, float* c,
              int c_stride, const float* factor) {
    switch (rows) {
        case 1: return multiply<1, N>(a, a_stride, b, b_stride, pairs, c, c_stride, factor);
        case 2: return multiply<2, N>(a, a_stride, b, b_stride, pairs, c, c_stride, factor);
        case 3: return multiply<3, N>(a, a_stride, b, b_stride, pairs, c, c_stride, factor);
        case 4: return multiply<4, N>(a, a_stride, b, b_stride, pairs, c, c_stride, factor);
        case 5: return multiply<5, N>(a, a_stride, b, b_stride, pairs, c, c_stride, factor);
        default: return multiply<ROWS, N>(a, a_stride, b, b_stride, pairs, c, c_stride, factor);
    }
}

// 2 to the power of x <= 0, to 2e-7: nearest integer, and a polynomial of degree 6 (Taylor) for the rest in [-.5, .5].
inline __m512 power_of_two(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.5403530e-4f);
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(1.3333558e-3f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(9.6181291e-3f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(5.5504109e-2f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(2.4022651e-1f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(6.9314718e-1f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, whole);
}

// Transposes 16 rows of 16 pairs: out[pair][row], rows of `out` BLOCK apart.
inline void transpose(const uint16_t* const* rows, int offset, int32_t* out) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + offset);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        _mm512_store_si512(out + i * BLOCK, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
        _mm512_store_si512(out + (i + 4) * BLOCK, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88));
        _mm512_store_si512(out + (i + 8) * BLOCK, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
        _mm512_store_si512(out + (i + 12) * BLOCK, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd));
    }
}

// What a thread works in.
struct Work {
    int32_t* keys;     // [size / 2, BLOCK] pairs of a block's keys
    int32_t* values;   // [BLOCK / 2, value size] pairs of its values
    uint16_t* query;   // [rows, size]
    float* sums;       // [rows, value size]: weighted values
    float* weights;    // [rows, LANES]: sums of weights
    float* largest;    // [rows] scores

    static size_t bytes(const Layer& layer, int rows) {
        return 4 * (size_t)(layer.size / 2 * BLOCK + BLOCK / 2 * layer.value_size) + 2 * (size_t)rows * layer.size +
               4 * (size_t)rows * (layer.value_size + LANES) + 4 * (size_t)(rows + LANES);
    }

    Work(char* memory, const Layer& layer, int rows) {
        keys = (int32_t*)memory;
        values = keys + layer.size / 2 * BLOCK;
        sums = (float*)(values + BLOCK / 2 * layer.value_size);
        weights = sums + (size_t)rows * layer.value_size;
        query = (uint16_t*)(weights + (size_t)rows * LANES);
        largest = (float*)(query + (size_t)rows * layer.size);
    }
};

// The keys and values of one block, in the order in which products read them.
void pack(const Layer& layer, const Work& work, const uint16_t* const* keys, const uint16_t* const* values) {
    for (int row = 0; row < BLOCK; row += 16)
        for (int offset = 0; offset < layer.size; offset += 32)
            transpose(keys + row, offset, work.keys + offset / 2 * BLOCK + row);
    alignas(64) static const uint16_t LOW[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(LOW), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int row = 0; row < BLOCK; row += 2)
        for (int offset = 0; offset < layer.value_size; offset += 32) {
            const __m512i even = _mm512_loadu_si512(values[row] + offset);
            const __m512i odd = _mm512_loadu_si512(values[row + 1] + offset);
            int32_t* out = work.values + row / 2 * layer.value_size + offset;
            _mm512_store_si512(out, _mm512_permutex2var_epi16(even, low, odd));
            _mm512_store_si512(out + LANES, _mm512_permutex2var_epi16(even, high, odd));
        }
}

// Scores of a row to weights; what the sums so far are to be multiplied with.
float weigh(const float* scores, int low, int high, float scale, float& largest, float* total, uint16_t* weights) {
    __mmask16 seen[VECTORS];
    __m512 score[VECTORS], top = _mm512_set1_ps(NOTHING);
    for (int n = 0; n < VECTORS; ++n) {
        const int from = std::clamp(low - n * LANES, 0, LANES), to = std::clamp(high - n * LANES, 0, LANES);
        seen[n] = (__mmask16)(((1u << to) - 1) & ~((1u << from) - 1));
        score[n] = _mm512_mul_ps(_mm512_load_ps(scores + n * LANES), _mm512_set1_ps(scale));
        top = _mm512_mask_max_ps(top, seen[n], top, score[n]);
    }
    const float before = largest;
    largest = std::max(before, _mm512_reduce_max_ps(top));
    __m512 sum = _mm512_setzero_ps();
    for (int n = 0; n < VECTORS; ++n) {
        const __m512 weight = power_of_two(_mm512_sub_ps(score[n], _mm512_set1_ps(largest)));
        const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_mov_ps(seen[n], weight));
        _mm256_store_si256((__m256i*)(weights + n * LANES), rounded);
        sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16)));
    }
    const __m512 factor = power_of_two(_mm512_set1_ps(before - largest));
    _mm512_store_ps(total, _mm512_fmadd_ps(_mm512_load_ps(total), factor, sum));
    return _mm512_cvtss_f32(factor);
}

// Rows [first, last) of a tile, `share` for each token, look at the packed block that begins at position `start`.
void look(const Plan& plan, const Layer& layer, const Work& work, const Tile& tile, int first, int last, int start) {
    const int share = layer.heads / layer.kv_heads;
    const float scale = layer.scale * 1.44269504f;
    alignas(64) float scores[ROWS * BLOCK];
    alignas(64) uint16_t weights[ROWS * BLOCK];
    float factors[ROWS];
    for (int row = first; row < last; row += ROWS) {
        const int rows = std::min(ROWS, last - row);
        if (plan.high[tile.first + (row + rows - 1) / share] <= start) continue;
        multiply<VECTORS>(rows, work.query + (size_t)row * layer.size, layer.size, work.keys, BLOCK, layer.size / 2,
                          scores, BLOCK, nullptr);
        for (int m = 0; m < rows; ++m) {
            const int token = tile.first + (row + m) / share;
            factors[m] = weigh(scores + m * BLOCK, plan.low[token] - start, plan.high[token] - start, scale,
                               work.largest[row + m], work.weights + (size_t)(row + m) * LANES, weights + m * BLOCK);
        }
        float* sums = work.sums + (size_t)row * layer.value_size;
        int column = 0;
        for (; column + 4 * LANES <= layer.value_size; column += 4 * LANES)
            multiply<4>(rows, weights, BLOCK, work.values + column, layer.value_size, BLOCK / 2, sums + column,
                        layer.value_size, factors);
        if (column < layer.value_size)
            multiply<2>(rows, weights, BLOCK, work.values + column, layer.value_size, BLOCK / 2, sums + column,
                        layer.value_size, factors);
    }
}

// Packs the block of positions [start, start + BLOCK), of which those before `end` are there.
void gather(const Layer& layer, const Work& work, const Tile& tile, int head, int start, int end, const int32_t* order) {
    const uint16_t *keys[BLOCK], *values[BLOCK];
    for (int i = 0; i < BLOCK; ++i) {
        const int position = start + i;
        if (position >= end) {
            keys[i] = values[i] = ZEROS;
            continue;
        }
        const int place = order && position >= tile.shared ? order[position - tile.shared] : position;
        const int64_t row = (int64_t)(tile.slot + place) * layer.kv_heads + head;
        keys[i] = layer.keys + row * layer.size;
        values[i] = layer.values + row * layer.value_size;
    }
    pack(layer, work, keys, values);
}

// One tile and one head of keys, from the first to the last block.
void attend(const Plan& plan, const Layer& layer, const Work& work, const Tile& tile, int head) {
    const int share = layer.heads / layer.kv_heads, rows = tile.count * share;
    for (int row = 0; row < rows; ++row) {
        const uint16_t* query = layer.query + (int64_t)(head * share + row % share) * layer.query_head +
                                (int64_t)(tile.first + row / share) * layer.query_token;
        std::copy(query, query + layer.size, work.query + (size_t)row * layer.size);
        work.largest[row] = NOTHING;
    }
    std::fill(work.sums, work.sums + (size_t)rows * layer.value_size, 0.0f);
    std::fill(work.weights, work.weights + (size_t)rows * LANES, 0.0f);

    int low = plan.low[tile.first];
    for (int token = 1; token < tile.count; ++token) low = std::min(low, plan.low[tile.first + token]);
    low = low / BLOCK * BLOCK;
    for (int start = low; start < tile.shared; start += BLOCK) {
        gather(layer, work, tile, head, start, tile.shared, nullptr);
        look(plan, layer, work, tile, 0, rows, start);
    }
    for (int token = 0; token < tile.count && tile.order >= 0; ++token) {
        const int end = plan.high[tile.first + token];
        const int32_t* order = plan.orders + (int64_t)(tile.order + token) * plan.depth;
        for (int start = std::max(low, tile.shared); start < end; start += BLOCK) {
            gather(layer, work, tile, head, start, end, order);
            look(plan, layer, work, tile, token * share, (token + 1) * share, start);
        }
    }

    for (int row = 0; row < rows; ++row) {
        uint16_t* out = layer.out + ((int64_t)(tile.first + row / share) * layer.heads + head * share + row % share) *
                                        layer.value_size;
        const float total = _mm512_reduce_add_ps(_mm512_load_ps(work.weights + (size_t)row * LANES));
        const __m512 inverse = _mm512_set1_ps(1.0f / total);
        for (int column = 0; column < layer.value_size; column += LANES) {
            const __m512 sum = _mm512_load_ps(work.sums + (size_t)row * layer.value_size + column);
            _mm256_storeu_si256((__m256i*)(out + column), (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(sum, inverse)));
        }
    }
}

// Puts the keys and values of a token in the store.
void keep(const Plan& plan, const Layer& layer, int token) {
    for (int head = 0; head < layer.kv_heads; ++head) {
        const int64_t row = (int64_t)plan.places[token] * layer.kv_heads + head;
        const uint16_t* key = layer.key + head * layer.key_head + token * layer.key_token;
        const uint16_t* value = layer.value + head * layer.value_head + token * layer.value_token;
        std::copy(key, key + layer.size, layer.keys + row * layer.size);
        std::copy(value, value + layer.value_size, layer.values + row * layer.value_size);
    }
}

}  // namespace

// Stores the keys and values of a pass and attends; 0, or 1 when there is no memory to work in.
extern "C" int bozza_attend(const Plan* plan, const Layer* layer) {
    int most = 0, failed = 0;
    for (int i = 0; i < plan->tile_count; ++i) most = std::max(most, plan->tiles[i].count);
    const int rows = most * (layer->heads / layer->kv_heads), tasks = plan->tile_count * layer->kv_heads;
    const size_t bytes = (Work::bytes(*layer, rows) + 63) / 64 * 64;
    // Always as many threads as torch has: its pool forgets those that it can do without, and makes them anew.
#pragma omp parallel num_threads(plan->threads) if (tasks > 1) reduction(| : failed)
    {
#pragma omp for
        for (int token = 0; token < plan->tokens; ++token) keep(*plan, *layer, token);
        char* memory = (char*)std::aligned_alloc(64, bytes);
        failed = !memory;
        // The last tiles of a prompt see most, so they come first.
#pragma omp for schedule(dynamic)
        for (int task = tasks - 1; task >= 0; --task)
            if (memory)
                attend(*plan, *layer, Work(memory, *layer, rows), plan->tiles[task / layer->kv_heads],
                       task % layer->kv_heads);
        std::free(memory);
    }
    return failed;
}

// Sixteen float lanes: what every kernel is written on, once.
//
// AVX-512 holds a V in one register, AVX2 in two, the portable build in an array. Every operation is one IEEE
// operation a lane and every reduction is one fixed tree, so the three builds compute the same bits. This needs
// -ffp-contract=off: only a written fma() fuses.
//
// A file including this is compiled once for each instruction set with SHOAL_ISA naming it, and lives in namespace
// shoal::SHOAL_ISA, so that the three copies never share a symbol.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define SHOAL_JOIN_(name, isa) name##_##isa
#define SHOAL_JOIN(name, isa) SHOAL_JOIN_(name, isa)
#define SHOAL_EXPORT(name) extern "C" __attribute__((visibility("default"))) int SHOAL_JOIN(name, SHOAL_ISA)
#define UNROLL _Pragma("GCC unroll 16")

namespace shoal::SHOAL_ISA {

constexpr int LANES = 16;
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
struct bf12;  // bf16 in 12 bits: see weights.h

// How many V the registers hold. Where fma is a function call they hold none, and unrolling gains nothing.
#if defined(__AVX512F__)
constexpr int REGISTERS = 32;
#elif defined(__AVX2__) || defined(FP_FAST_FMAF)
constexpr int REGISTERS = 8;
#else
constexpr int REGISTERS = 1;
#endif

#if defined(__AVX512F__)

struct V { __m512 x; };
inline V splat(float f) { return {_mm512_set1_ps(f)}; }
inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline V load(const bf16* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline V load(const f16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline void store(float* p, V v) { _mm512_storeu_ps(p, v.x); }
inline V operator+(V a, V b) { return {_mm512_add_ps(a.x, b.x)}; }
inline V operator-(V a, V b) { return {_mm512_sub_ps(a.x, b.x)}; }
inline V operator*(V a, V b) { return {_mm512_mul_ps(a.x, b.x)}; }
inline V operator/(V a, V b) { return {_mm512_div_ps(a.x, b.x)}; }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
inline V max(V a, V b) { return {_mm512_max_ps(a.x, b.x)}; }
inline V if_less(V a, V b, V yes, V no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.x, b.x, _CMP_LT_OQ), no.x, yes.x)};
}
inline bool any_less(V a, V b) { return _mm512_cmp_ps_mask(a.x, b.x, _CMP_LT_OQ) != 0; }
inline bool any_equal(V a, V b) { return _mm512_cmp_ps_mask(a.x, b.x, _CMP_EQ_OQ) != 0; }
inline V add_to_exponent(V v, V n) {
    return {_mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(v.x), _mm512_slli_epi32(_mm512_castps_si512(n.x), 23)))};
}
inline __m256 low_half(V v) { return _mm512_castps512_ps256(v.x); }
inline __m256 high_half(V v) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v.x), 1)); }

// Sixteen double sums of lanes.
struct Sums { __m512d a, b; };
inline Sums no_sums() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
inline Sums operator+(Sums s, V v) {
    return {_mm512_add_pd(s.a, _mm512_cvtps_pd(low_half(v))), _mm512_add_pd(s.b, _mm512_cvtps_pd(high_half(v)))};
}
inline void store(double* p, Sums s) { _mm512_storeu_pd(p, s.a), _mm512_storeu_pd(p + 8, s.b); }

// The two bf16 of each word: the low half is even, the high half odd.
inline V even(V words) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(words.x), 16))}; }
inline V odd(V words) {
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(words.x), _mm512_set1_epi32(int(0xffff0000))))};
}
inline V load_words(const bf16* p) { return {_mm512_loadu_ps(p)}; }

struct Table { __m512i x; };
inline Table load_table(const uint8_t* p) {
    return {_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline void decode(const uint8_t* low, const uint8_t* high, int half, Table table, V (&words)[2]) {
    __m512i numbers = _mm512_loadu_si512(high);
    if (half) numbers = _mm512_srli_epi16(numbers, 4);
    const __m512i a = _mm512_loadu_si512(low);
    const __m512i b = _mm512_shuffle_epi8(table.x, _mm512_and_si512(numbers, _mm512_set1_epi8(0x0f)));
    words[0] = {_mm512_castsi512_ps(_mm512_unpacklo_epi8(a, b))};
    words[1] = {_mm512_castsi512_ps(_mm512_unpackhi_epi8(a, b))};
}

// Transposes the 4 x 4 words in each quarter of x.
inline void transpose_quarters(const __m512* x, __m512* out) {
    const __m512 a = _mm512_unpacklo_ps(x[0], x[1]), b = _mm512_unpackhi_ps(x[0], x[1]);
    const __m512 c = _mm512_unpacklo_ps(x[2], x[3]), d = _mm512_unpackhi_ps(x[2], x[3]);
    out[0] = _mm512_shuffle_ps(a, c, 0x44), out[1] = _mm512_shuffle_ps(a, c, 0xEE);
    out[2] = _mm512_shuffle_ps(b, d, 0x44), out[3] = _mm512_shuffle_ps(b, d, 0xEE);
}
// See transpose() below, for 32-bit words: a cache line of each row, read once, since rows that lie 4 KB apart share so
// few places in L1 that a line is gone before its second quarter is asked for.
inline void transpose_words(const float* const* rows, long at, V (&out)[16]) {
    __m512 x[16], y[16];
    UNROLL for (int i = 0; i < 16; i++) x[i] = _mm512_loadu_ps(rows[i] + at);
    UNROLL for (int i = 0; i < 16; i += 4) transpose_quarters(x + i, y + i);
    UNROLL for (int i = 0; i < 4; i++) {  // quarter j of y[4 r + i] is word 4 j + i of rows 4 r...
        const __m512 a = _mm512_shuffle_f32x4(y[i], y[4 + i], 0x44), b = _mm512_shuffle_f32x4(y[i], y[4 + i], 0xEE);
        const __m512 c = _mm512_shuffle_f32x4(y[8 + i], y[12 + i], 0x44);
        const __m512 d = _mm512_shuffle_f32x4(y[8 + i], y[12 + i], 0xEE);
        out[i] = {_mm512_shuffle_f32x4(a, c, 0x88)}, out[4 + i] = {_mm512_shuffle_f32x4(a, c, 0xDD)};
        out[8 + i] = {_mm512_shuffle_f32x4(b, d, 0x88)}, out[12 + i] = {_mm512_shuffle_f32x4(b, d, 0xDD)};
    }
}
// Half a line.
inline void transpose_words(const bf16* const* rows, long at, V (&out)[8]) {
    auto words = [&](int row) {
        return _mm512_castps_pd(_mm512_castps256_ps512(_mm256_loadu_ps(reinterpret_cast<const float*>(rows[row] + at))));
    };
    __m512 x[8], y[8];  // rows i, i + 4
    UNROLL for (int i = 0; i < 8; i++) {
        const int row = i / 4 * 8 + i % 4;
        x[i] = _mm512_castpd_ps(_mm512_insertf64x4(words(row), _mm512_castpd512_pd256(words(row + 4)), 1));
    }
    transpose_quarters(x, y), transpose_quarters(x + 4, y + 4);
    UNROLL for (int i = 0; i < 4; i++) {
        out[i] = {_mm512_shuffle_f32x4(y[i], y[4 + i], 0x88)};
        out[4 + i] = {_mm512_shuffle_f32x4(y[i], y[4 + i], 0xDD)};
    }
}

// acc = fma(x, w, acc) that keeps acc in its register: left to choose, GCC 12 overwrites the broadcast instead, runs
// out of registers and spills.
inline void fma_into(V& acc, V x, V w) { asm("vfmadd231ps %2, %1, %0" : "+v"(acc.x) : "v"(x.x), "v"(w.x)); }
// The same with splat(*x), where x is used once.
inline void fma_splat(V& acc, const float* x, V w) {
    asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(acc.x) : "v"(w.x), "m"(*x));
}

#elif defined(__AVX2__)

struct V { __m256 a, b; };
inline V splat(float f) { __m256 v = _mm256_set1_ps(f); return {v, v}; }
inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256 widen(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
inline V load(const bf16* p) {
    auto* q = reinterpret_cast<const __m128i*>(p);
    return {widen(_mm_loadu_si128(q)), widen(_mm_loadu_si128(q + 1))};
}
inline V load(const f16* p) {
    auto* q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
inline void store(float* p, V v) { _mm256_storeu_ps(p, v.a), _mm256_storeu_ps(p + 8, v.b); }
inline V operator+(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline V operator-(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline V operator*(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline V operator/(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline V max(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline V if_less(V x, V y, V yes, V no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
inline bool any_less(V x, V y) {
    return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)));
}
inline bool any_equal(V x, V y) {
    return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ)));
}
inline __m256 add_to_exponent(__m256 v, __m256 n) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(v), _mm256_slli_epi32(_mm256_castps_si256(n), 23)));
}
inline V add_to_exponent(V v, V n) { return {add_to_exponent(v.a, n.a), add_to_exponent(v.b, n.b)}; }
inline __m256 low_half(V v) { return v.a; }
inline __m256 high_half(V v) { return v.b; }

struct Sums { __m256d a, b, c, d; };
inline Sums no_sums() { __m256d zero = _mm256_setzero_pd(); return {zero, zero, zero, zero}; }
inline __m256d low_doubles(__m256 x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
inline __m256d high_doubles(__m256 x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }
inline Sums operator+(Sums s, V v) {
    return {_mm256_add_pd(s.a, low_doubles(v.a)), _mm256_add_pd(s.b, high_doubles(v.a)),
            _mm256_add_pd(s.c, low_doubles(v.b)), _mm256_add_pd(s.d, high_doubles(v.b))};
}
inline void store(double* p, Sums s) {
    _mm256_storeu_pd(p, s.a), _mm256_storeu_pd(p + 4, s.b), _mm256_storeu_pd(p + 8, s.c), _mm256_storeu_pd(p + 12, s.d);
}

inline __m256 even(__m256 words) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(words), 16));
}
inline __m256 odd(__m256 words) {
    return _mm256_and_ps(words, _mm256_castsi256_ps(_mm256_set1_epi32(int(0xffff0000))));
}
inline V even(V words) { return {even(words.a), even(words.b)}; }
inline V odd(V words) { return {odd(words.a), odd(words.b)}; }
inline V load_words(const bf16* p) { return load(reinterpret_cast<const float*>(p)); }

struct Table { __m256i x; };
inline Table load_table(const uint8_t* p) {
    return {_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline void decode(const uint8_t* low, const uint8_t* high, int half, Table table, __m256& words0, __m256& words1) {
    __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high));
    if (half) numbers = _mm256_srli_epi16(numbers, 4);
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low));
    const __m256i b = _mm256_shuffle_epi8(table.x, _mm256_and_si256(numbers, _mm256_set1_epi8(0x0f)));
    words0 = _mm256_castsi256_ps(_mm256_unpacklo_epi8(a, b));
    words1 = _mm256_castsi256_ps(_mm256_unpackhi_epi8(a, b));
}
inline void decode(const uint8_t* low, const uint8_t* high, int half, Table table, V (&words)[2]) {
    decode(low, high, half, table, words[0].a, words[1].a);
    decode(low + 32, high + 32, half, table, words[0].b, words[1].b);
}

template <class T> inline void transpose_words(const T* const* rows, long at, __m256 (&out)[4]) {
    auto words = [&](int row) { return _mm_loadu_ps(reinterpret_cast<const float*>(rows[row] + at)); };
    __m256 x[4];  // rows i, i + 4
    UNROLL for (int i = 0; i < 4; i++) x[i] = _mm256_set_m128(words(i + 4), words(i));
    const __m256 a = _mm256_unpacklo_ps(x[0], x[1]), b = _mm256_unpackhi_ps(x[0], x[1]);
    const __m256 c = _mm256_unpacklo_ps(x[2], x[3]), d = _mm256_unpackhi_ps(x[2], x[3]);
    out[0] = _mm256_shuffle_ps(a, c, 0x44), out[1] = _mm256_shuffle_ps(a, c, 0xEE);
    out[2] = _mm256_shuffle_ps(b, d, 0x44), out[3] = _mm256_shuffle_ps(b, d, 0xEE);
}
template <class T> inline void transpose_words(const T* const* rows, long at, V (&out)[4]) {
    __m256 low[4], high[4];
    transpose_words(rows, at, low), transpose_words(rows + 8, at, high);
    UNROLL for (int i = 0; i < 4; i++) out[i] = {low[i], high[i]};
}
inline void fma_into(V& acc, V x, V w) {
    asm("vfmadd231ps %2, %1, %0" : "+x"(acc.a) : "x"(x.a), "x"(w.a));
    asm("vfmadd231ps %2, %1, %0" : "+x"(acc.b) : "x"(x.b), "x"(w.b));
}
inline void fma_splat(V& acc, const float* x, V w) { fma_into(acc, splat(*x), w); }

#else

struct V { float lane[LANES]; };
#define EACH_LANE(expression)                                                                  \
    V r;                                                                                       \
    for (int i = 0; i < LANES; i++) r.lane[i] = (expression);                                  \
    return r
inline float widen(float x) { return x; }
inline float widen(bf16 h) { return std::bit_cast<float>(uint32_t(h.bits) << 16); }
inline float widen(f16 h) {
    uint32_t sign = uint32_t(h.bits & 0x8000) << 16, rest = h.bits & 0x7fff;
    if (rest < 0x0400) return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(float(rest) * 0x1p-24f));
    uint32_t rebias = rest >= 0x7c00 ? 0x70000000 : 0x38000000;  // infinity and NaN keep the largest exponent
    return std::bit_cast<float>(sign | ((rest << 13) + rebias));
}
inline V splat(float f) { EACH_LANE(f); }
template <class T> inline V load(const T* p) { EACH_LANE(widen(p[i])); }
inline void store(float* p, V v) { for (int i = 0; i < LANES; i++) p[i] = v.lane[i]; }
inline V operator+(V x, V y) { EACH_LANE(x.lane[i] + y.lane[i]); }
inline V operator-(V x, V y) { EACH_LANE(x.lane[i] - y.lane[i]); }
inline V operator*(V x, V y) { EACH_LANE(x.lane[i] * y.lane[i]); }
inline V operator/(V x, V y) { EACH_LANE(x.lane[i] / y.lane[i]); }
inline V fma(V x, V y, V z) { EACH_LANE(std::fma(x.lane[i], y.lane[i], z.lane[i])); }
inline V max(V x, V y) { EACH_LANE(x.lane[i] > y.lane[i] ? x.lane[i] : y.lane[i]); }
inline V if_less(V x, V y, V yes, V no) { EACH_LANE(x.lane[i] < y.lane[i] ? yes.lane[i] : no.lane[i]); }
inline bool any_less(V x, V y) {
    bool any = false;
    for (int i = 0; i < LANES; i++) any |= x.lane[i] < y.lane[i];
    return any;
}
inline bool any_equal(V x, V y) {
    bool any = false;
    for (int i = 0; i < LANES; i++) any |= x.lane[i] == y.lane[i];
    return any;
}
inline V add_to_exponent(V v, V n) {
    EACH_LANE(std::bit_cast<float>(std::bit_cast<uint32_t>(v.lane[i]) + (std::bit_cast<uint32_t>(n.lane[i]) << 23)));
}
struct Sums { double lane[LANES]; };
inline Sums no_sums() { return {}; }
inline Sums operator+(Sums s, V v) {
    for (int i = 0; i < LANES; i++) s.lane[i] += v.lane[i];
    return s;
}
inline void store(double* p, Sums s) { for (int i = 0; i < LANES; i++) p[i] = s.lane[i]; }
inline uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
inline V load_words(const bf16* p) {
    V words;
    std::memcpy(&words, p, sizeof words);
    return words;
}
inline V even(V words) { EACH_LANE(std::bit_cast<float>(bits(words.lane[i]) << 16)); }
inline V odd(V words) { EACH_LANE(std::bit_cast<float>(bits(words.lane[i]) & 0xffff0000)); }
struct Table { const uint8_t* x; };
inline Table load_table(const uint8_t* p) { return {p}; }
inline void decode(const uint8_t* low, const uint8_t* high, int half, Table table, V (&words)[2]) {
    for (int pair = 0; pair < 2; pair++)
        for (int i = 0; i < LANES; i++) {
            const int at = i / 4 * 16 + pair * 8 + i % 4 * 2;
            const uint32_t first = low[at] | table.x[high[at] >> 4 * half & 15] << 8;
            const uint32_t second = low[at + 1] | table.x[high[at + 1] >> 4 * half & 15] << 8;
            words[pair].lane[i] = std::bit_cast<float>(first | second << 16);
        }
}
inline void fma_into(V& acc, V x, V w) { acc = fma(x, w, acc); }
inline void fma_splat(V& acc, const float* x, V w) { acc = fma(splat(*x), w, acc); }
#undef EACH_LANE

#endif

// The fixed tree: lane i with lane i + 8, then i + 4, i + 2, i + 1.
#if defined(__AVX2__)
inline float sum(V v) {
    __m256 x = _mm256_add_ps(low_half(v), high_half(v));
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
inline float largest(V v) {
    __m256 x = _mm256_max_ps(low_half(v), high_half(v));
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
#else
inline float sum(V v) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) v.lane[i] += v.lane[i + half];
    return v.lane[0];
}
inline float largest(V v) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) v.lane[i] = v.lane[i] > v.lane[i + half] ? v.lane[i] : v.lane[i + half];
    return v.lane[0];
}
#endif

// decode(): four k of a panel's bf16 from their 64 low bytes and the numbers of their high bytes in a table of 16, which
// are the low (half 0) or high (half 1) four bits of 64 bytes. What comes first is k 0 and 1 of each lane, a word, then
// k 2 and 3.

// PIECE elements of each of sixteen rows, transposed and widened: lane i of out[d] is rows[i][at + d].
#if defined(__AVX512F__)
template <class T> constexpr int PIECE = 16;
#else
template <class T> constexpr int PIECE = 16 / sizeof(T);
#endif
#if defined(__AVX2__)
inline void transpose(const float* const* rows, long at, V (&out)[PIECE<float>]) { transpose_words(rows, at, out); }
inline void transpose(const bf16* const* rows, long at, V (&out)[PIECE<bf16>]) {
    V words[PIECE<bf16> / 2];
    transpose_words(rows, at, words);
    UNROLL for (int i = 0; i < PIECE<bf16> / 2; i++) out[2 * i] = even(words[i]), out[2 * i + 1] = odd(words[i]);
}
#else
template <class T> inline void transpose(const T* const* rows, long at, V (&out)[PIECE<T>]) {
    for (int d = 0; d < PIECE<T>; d++)
        for (int i = 0; i < LANES; i++) out[d].lane[i] = widen(rows[i][at + d]);
}
#endif

// Keeps a pointer in a register of its own: GCC otherwise derives it from others, in more registers than there are.
inline void hold(const float*& p) { asm("" : "+r"(p)); }

inline V lane_numbers() {
    static constexpr float numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(numbers);
}

// The first n lanes (all when n >= 16) of memory that may end there.
inline V load_part(const float* p, long n, float fill = 0) {
    if (n >= LANES) return load(p);
    float whole[LANES];
    for (int i = 0; i < LANES; i++) whole[i] = i < n ? p[i] : fill;
    return load(whole);
}
inline void store_part(float* p, V v, long n) {
    if (n >= LANES) return store(p, v);
    float whole[LANES];
    store(whole, v);
    for (int i = 0; i < n; i++) p[i] = whole[i];
}

// 2^x for x < 127, to about 1 ulp: a minimax polynomial on [-1/2, 1/2] times a power of two. Exactly 1 at 0, exactly 0
// below -125 (so 2^-inf is 0); NaN stays NaN. shoal.kernels.reference spells out the same steps.
inline V exp2(V x) {
    const V lowest = splat(-125), magic = splat(0x1.8p23f);  // adding magic rounds to an integer
    V y = max(lowest, x), n = y + magic, f = y - (n - magic);
    V p = splat(0.00015353362f);
    p = fma(p, f, splat(0.00133988739f));
    p = fma(p, f, splat(0.00961843692f));
    p = fma(p, f, splat(0.0555033237f));
    p = fma(p, f, splat(0.240226477f));
    p = fma(p, f, splat(0.693147182f));
    p = fma(p, f, splat(1));
    return if_less(x, lowest, splat(0), add_to_exponent(p, n));  // the low bits of n are the integer
}
inline float exp2(float x) {
    float r[LANES];
    store(r, exp2(splat(x)));
    return r[0];
}
// x / (1 + 2^e), that is x sigmoid(-e ln 2).
inline V times_sigmoid(V x, V e) {
    const V most = splat(126);
    return x / (exp2(if_less(most, e, most, e)) + splat(1));
}

}  // namespace shoal::SHOAL_ISA

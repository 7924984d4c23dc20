// The operators between two attentions for a few tokens: products with weights in torch's layout, norms, gates.
//
// With few rows a product takes as long as reading its weights. So the weights stay as they are, quantized ones too: each
// row of them is read once for all tokens, in order, and the next rows are fetched meanwhile.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "heads.h"
#include "many.h"
#include "quantized.h"
#include "vectors.h"

// x times the transposed weights, plus the bias; up to three weights with the same x.
extern "C" struct Weights {
    const char *weight, *bias;  // no bias: null
    char *out;
    int64_t outputs;
    int64_t bits, group;  // of a quantized weight, see quantized.h; 0 bits: the weight has the type of x
};

extern "C" struct Products {
    int64_t rows, width, threads, type;
    const char *x;
    int64_t count;
    Weights all[3];
    int64_t wide = 0;  // whether the outputs are float32 in place of the type
};

// down(activation(gate(x)) * up(x)), in `scratch` of rows x inner elements; without weights of up: down(activation(gate(x))).
extern "C" struct Gated {
    int64_t rows, width, threads, type;
    const char *x;
    char *scratch;
    Weights gate, up, down;
    int64_t activation;  // 0: SiLU; 1: GELU by its approximation with tanh; 2: ReLU; 3: its square
};

// A norm by the root mean square, of what is left of a row without its mean if it is centred (a layer norm). No weight:
// there is no norm.
extern "C" struct Scaled {
    const char *weight, *bias;  // no bias: null
    int64_t centred;
    double epsilon, plus;  // plus is added to the weight
};

extern "C" struct Norm {
    int64_t rows, width, threads, type;
    const char *x;
    char *out;
    Scaled by;
};

namespace {

constexpr int64_t EACH = 32;  // outputs of a piece of work
constexpr int AT_ONCE = 4;    // weight rows that are read at the same time

// With a single token floats are read fastest in one stream; widening halves leaves too little time for that.
template <class X>
inline bool in_one_stream(int64_t rows) {
    return rows == 1 && sizeof(typename X::T) == sizeof(float);
}

// Sums of the N-lane segments of a vector, in the first lanes.
template <int N>
inline Floats folded(Floats v) {
    if constexpr (N > 1) return folded<N / 2>(fold<N>(v, v, std::make_integer_sequence<int, W>()));
    return v;
}

// The sum of each of COUNT vectors, a power of two. The order of summation does not depend on their number.
template <int COUNT>
inline void totals(Floats *vectors, float *to) {
    if constexpr (COUNT > W) {
        totals<COUNT / 2>(vectors, to);
        totals<COUNT / 2>(vectors + COUNT / 2, to + COUNT / 2);
    } else {
        const Floats found = folded<W / COUNT>(gather<COUNT, W>(vectors));
        std::memcpy(to, &found, COUNT * sizeof *to);
    }
}

// Fetches the next weight rows in order, some lines in each turn of the loop that multiplies these, so that memory is
// read as evenly as it can be whatever the number of tokens.
class Ahead {
    const char *at;
    int64_t lines;

   public:
    Ahead(const void *first, int64_t lines) : at((const char *)first), lines(lines) {}

    // The lines of each turn: R rows are fetched while R are multiplied with so many vectors.
    template <class X>
    static int64_t each(int64_t R, int64_t width, int64_t vectors) {
        const int64_t passes = vectors / TILE + vectors % TILE / 2 + vectors % 2;
        const int64_t turns = std::max<int64_t>(passes * ((width + 2 * W - 1) / (2 * W)), 1);
        return ((R * width * (int64_t)sizeof(typename X::T) + 63) / 64 + turns - 1) / turns;
    }

    void fetch() {
        for (int64_t i = 0; i < lines; i++) __builtin_prefetch(at + 64 * i);
        at += 64 * lines;
    }
};

// Products of R weight rows with M vectors. The order of summation depends on neither.
template <class X, int R, int M>
void dots(const typename X::T *w, const typename X::T *x, int64_t width, float *to, Ahead &ahead) {
    Floats sums[M][R] = {};
    const auto add = [&](int64_t i, auto read) {
        Pair each[M];
        ahead.fetch();
        for (int m = 0; m < M; m++) each[m] = read(x + m * width + i);
        for (int r = 0; r < R; r++) {
            const Pair row = read(w + r * width + i);
            for (int m = 0; m < M; m++) sums[m][r] = sums[m][r] + row.a * each[m].a + row.b * each[m].b;
        }
    };
    const int64_t whole = width - width % (2 * W);
    for (int64_t i = 0; i < whole; i += 2 * W) add(i, [](const typename X::T *from) { return X::widen(from); });
    if (whole < width) add(whole, [&](const typename X::T *from) { return widen<X>(from, width - whole); });
    float found[R * M];
    totals<R * M>(&sums[0][0], found);
    for (int m = 0; m < M; m++)
        for (int r = 0; r < R; r++) to[m * EACH + r] = found[m * R + r];
}

template <class X, int R>
void dots(const typename X::T *w, const typename X::T *x, int64_t width, int64_t rows, int64_t lines, float *to) {
    Ahead ahead(w + R * width, lines);
    for (; rows >= TILE; rows -= TILE, x += TILE * width, to += TILE * EACH) dots<X, R, TILE>(w, x, width, to, ahead);
    for (; rows >= 2; rows -= 2, x += 2 * width, to += 2 * EACH) dots<X, R, 2>(w, x, width, to, ahead);
    if (rows) dots<X, R, 1>(w, x, width, to, ahead);
}

template <class X>
inline float one(const typename X::T *from) {
    return widen<X>(from, 1).a[0];
}

template <class X>
inline void one(float x, typename X::T *to) {
    narrow<X>({all(x), all(x)}, to, 1);
}

// What is multiplied with weights: rows, and their codes if some of the weights are quantized.
template <class X>
struct Inputs {
    const typename X::T *x;
    const int64_t rows, width;
    const CodedInputs coded;

    Inputs(const char *x, int64_t rows, int64_t width, bool is_coded)
        : x((const typename X::T *)x), rows(rows), width(width), coded(is_coded ? rows : 0, width) {}

    // Round the rows where that is needed. Returns false if there is no memory.
    bool prepare(int64_t threads) const { return coded.code<X>((const char *)x, threads); }
};

inline bool is_quantized(const Weights &by) { return by.bits; }

template <class X>
int64_t bytes_of_weights(const Weights &by, int64_t width) {
    if (!is_quantized(by)) return by.outputs * width * (int64_t)sizeof(typename X::T);
    return (by.outputs + LANES - 1) / LANES * block_bytes(by.bits, by.group, width);
}

// Outputs first ... first + n of every row by plain weights, into `to`, EACH floats for each row.
template <class X>
void plain_product(const Weights &by, const Inputs<X> &in, int64_t first, int64_t n, float *to) {
    const int64_t rows = in.rows, width = in.width;
    const typename X::T *w = (const typename X::T *)by.weight + first * width;
    const int64_t each = Ahead::each<X>(AT_ONCE, width, rows), alone = Ahead::each<X>(1, width, rows);
    int64_t i = 0;
    if (!in_one_stream<X>(rows))
        for (; i + AT_ONCE <= n; i += AT_ONCE) dots<X, AT_ONCE>(w + i * width, in.x, width, rows, each, to + i);
    for (; i < n; i++) dots<X, 1>(w + i * width, in.x, width, rows, alone, to + i);
}

static_assert(EACH % LANES == 0, "a piece of work has whole blocks of a quantized weight");

// Outputs first ... first + n of every row, with the bias, into `to`, EACH floats for each row.
template <class X>
void product(const Weights &by, const Inputs<X> &in, int64_t first, int64_t n, float *to) {
    const typename X::T *bias = (const typename X::T *)by.bias;
    if (is_quantized(by))
        quantized_products(by.weight, by.bits, by.group, in.coded, in.rows, in.width, first, n, to, EACH);
    else
        plain_product<X>(by, in, first, n, to);
    if (!bias) return;
    for (int64_t i = 0; i < n; i++) {
        const float more = one<X>(bias + first + i);
        for (int64_t m = 0; m < in.rows; m++) to[m * EACH + i] += more;
    }
}

// Write n floats of every row to their place in (rows, outputs).
template <class X>
void write(const float *from, int64_t rows, int64_t outputs, int64_t first, int64_t n, char *out) {
    for (int64_t m = 0; m < rows; m++)
        for (int64_t i = 0; i < n; i++) one<X>(from[m * EACH + i], (typename X::T *)out + m * outputs + first + i);
}

inline int64_t pieces(int64_t outputs) { return (outputs + EACH - 1) / EACH; }

constexpr int64_t FEW = 16, FEW_QUANTIZED = 32, FEW_WIDE = 128;  // rows of products beside tiles

// Whether products are computed in tiles. A step of the model has few rows, whose numbers do not depend on how many they
// are. Quantized weights are rounded to bfloat16 in tiles, so more rows are few for them, above all if outputs are wide.
template <class X>
bool in_squares(const Products &p) {
    if (!std::is_same_v<X, BFloat16> || p.width % (2 * SQUARE) || !has_squares()) return false;
    const bool rounds = std::any_of(p.all, p.all + p.count, is_quantized);
    return p.rows > (!rounds ? FEW : p.wide ? FEW_WIDE : FEW_QUANTIZED);
}

inline int64_t products_in_squares(const Products &p) {
#ifdef KVKEEP_SQUARES
    const ManyRows rows(p.rows, p.width, p.threads, p.wide);
    if (!rows.prepare(p.x)) return -1;
    for (const Weights *by = p.all; by < p.all + p.count; by++) {
        bool done = false;
        if (is_quantized(*by)) {
            by_packing(by->bits, by->group, [&](auto packing) {
                typedef decltype(packing) P;
                const int64_t bytes = block_bytes(by->bits, by->group, p.width);
                done = rows.multiply_with(by->outputs, by->bias, by->out, [&](int64_t block, uint16_t *to) {
                    put_block<P>(by->weight + block * bytes, p.width, to);
                });
            });
        } else {
            done = rows.multiply_with(by->outputs, by->bias, by->out, [&](int64_t block, uint16_t *to) {
                const int64_t first = block * SQUARE;
                put_block((const uint16_t *)by->weight + first * p.width, by->outputs - first, p.width, to);
            });
        }
        if (!done) return -1;
    }
    return 0;
#else
    (void)p;
    return -1;
#endif
}

template <class X>
int64_t products_as(const Products &p) {
    if (in_squares<X>(p)) return products_in_squares(p);
    int64_t n = 0, bytes = 0;
    bool is_coded = false;
    for (int64_t i = 0; i < p.count; i++) {
        n += pieces(p.all[i].outputs), bytes += bytes_of_weights<X>(p.all[i], p.width);
        is_coded |= is_quantized(p.all[i]);
    }
    const Inputs<X> in(p.x, p.rows, p.width, is_coded);
    if (!in.prepare(p.threads)) return -1;
    const auto work = [&](int64_t i, float *scratch) {
        const Weights *by = p.all;
        for (; i >= pieces(by->outputs); by++) i -= pieces(by->outputs);
        const int64_t first = i * EACH, some = std::min(EACH, by->outputs - first);
        product<X>(*by, in, first, some, scratch);
        if (p.wide)
            write<Float32>(scratch, p.rows, by->outputs, first, some, by->out);
        else
            write<X>(scratch, p.rows, by->outputs, first, some, by->out);
    };
    return for_each_in_order(n, bytes, p.threads, p.rows * EACH, work) ? 0 : -1;
}

// x times the sigmoid of x.
inline Floats silu(Floats x) { return x / (1.0f + exp(-x)); }

// GELU by its usual approximation: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).
inline Floats gelu(Floats x) { return 0.5f * x * (1.0f + tanh(0.7978845608f * (x + 0.044715f * x * x * x))); }

inline Floats activated(int64_t activation, Floats x) {
    if (activation == 0) return silu(x);
    if (activation == 1) return gelu(x);
    const Floats some = select(x < 0.0f, Floats{}, x);  // NaN stays
    return activation == 2 ? some : some * some;
}

template <class X>
int64_t gated_as(const Gated &g) {
    const int64_t inner = g.gate.outputs;
    const int64_t bytes = bytes_of_weights<X>(g.gate, g.width) + bytes_of_weights<X>(g.up, g.width);
    const Inputs<X> in(g.x, g.rows, g.width, is_quantized(g.gate) || is_quantized(g.up));
    if (!in.prepare(g.threads)) return -1;
    const auto work = [&](int64_t i, float *scratch) {
        const int64_t first = i * EACH, some = std::min(EACH, inner - first);
        float *gate = scratch, *up = scratch + g.rows * EACH;
        product<X>(g.gate, in, first, some, gate);
        if (g.up.weight) product<X>(g.up, in, first, some, up);
        for (int64_t at = 0; at < g.rows * EACH; at += W) {
            const Floats x = activated(g.activation, load<Floats>(gate + at));
            store(gate + at, g.up.weight ? x * load<Floats>(up + at) : x);
        }
        write<X>(gate, g.rows, inner, first, some, g.scratch);
    };
    if (!for_each_in_order(pieces(inner), bytes, g.threads, 2 * g.rows * EACH, work)) return -1;
    return products_as<X>({g.rows, inner, g.threads, g.type, g.scratch, 1, {g.down}});
}

// The mean of a row.
template <class X>
float mean(const typename X::T *x, int64_t width) {
    const int64_t whole = width - width % (2 * W), rest = width - whole;
    Floats total = {};
    for (int64_t i = 0; i < whole; i += 2 * W) total += X::widen(x + i).a + X::widen(x + i).b;
    if (rest) total += widen<X>(x + whole, rest).a + widen<X>(x + whole, rest).b;
    return sum(total) / (float)width;
}

// Ones in the lanes of the first n elements, zeros in the others.
template <class X>
Pair lanes(int64_t n) {
    typename X::T ones[2 * W];
    X::narrow({all(1.0f), all(1.0f)}, ones);
    return widen<X>(ones, n);
}

// A row, without its mean if the norm is centred, over its root mean square, times the weight, plus the bias.
template <class X>
void norm_row(const Scaled &by, int64_t width, const typename X::T *x, typename X::T *out) {
    const typename X::T *weight = (const typename X::T *)by.weight, *bias = (const typename X::T *)by.bias;
    const int64_t whole = width - width % (2 * W), rest = width - whole;
    const float plus = (float)by.plus, middle = by.centred ? mean<X>(x, width) : 0.0f;
    Floats squares = {};
    const auto add = [&](Pair part) { squares = squares + part.a * part.a + part.b * part.b; };
    const auto less = [&](Pair part) -> Pair { return {part.a - middle, part.b - middle}; };
    for (int64_t i = 0; i < whole; i += 2 * W) add(less(X::widen(x + i)));
    if (rest) {
        const Pair part = less(widen<X>(x + whole, rest)), held = lanes<X>(rest);
        add({part.a * held.a, part.b * held.b});
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / (float)width + (float)by.epsilon);
    const auto scaled = [&](Pair part, Pair weight, Pair more) -> Pair {
        return {part.a * scale * (weight.a + plus) + more.a, part.b * scale * (weight.b + plus) + more.b};
    };
    for (int64_t i = 0; i < whole; i += 2 * W) {
        const Pair more = bias ? X::widen(bias + i) : Pair{};
        X::narrow(scaled(less(X::widen(x + i)), X::widen(weight + i), more), out + i);
    }
    if (!rest) return;
    const Pair more = bias ? widen<X>(bias + whole, rest) : Pair{};
    narrow<X>(scaled(less(widen<X>(x + whole, rest)), widen<X>(weight + whole, rest), more), out + whole, rest);
}

template <class X>
int64_t norm_as(const Norm &norm) {
    typedef typename X::T T;
    const auto work = [&](int64_t row, float *) {
        norm_row<X>(norm.by, norm.width, (const T *)norm.x + row * norm.width, (T *)norm.out + row * norm.width);
    };
    return for_each(norm.rows, norm.rows * norm.width * (int64_t)sizeof(T), norm.threads, 0, work) ? 0 : -1;
}

}  // namespace

// What a decoder layer does before and behind its attention, for a few tokens: norm, query, key and value, rotation; and
// output, norm and the feed-forward layer, each with what it is added to.

#pragma once

#include "codes.h"
#include "small.h"

// Queries, keys and values of a token per row, queries and keys rotated to the row's position, queries scaled.
extern "C" struct Before {
    int64_t rows, width, threads, type;
    const char *x;
    char *scratch;  // rows x width elements
    Scaled norm;
    Weights all[3];  // of queries, keys and values
    int64_t dim, rotary_dim;  // dims of a head, and the first of them that are rotated; 0: none
    double query_scale;       // 1: none
    Scaled each[2];       // of the heads of queries, and of keys
    const char *cosines, *sines;  // `rotary_dim` for each row
    int64_t cosine_row, sine_row;
};

// y = x + attention times the output's weights; then y + the feed-forward layer of the norm of y. Some models norm what
// they add, too.
extern "C" struct Behind {
    int64_t rows, width, threads, type;
    const char *x, *attention;
    int64_t attention_width;
    char *scratch;  // rows x (2 width + outputs of the gate) elements
    Weights output, gate, up, down;  // `down` has the result; `output` none
    Scaled norm;
    Scaled added[2];     // of what attention adds, and of what the feed-forward layer adds
    int64_t activation;  // as in Gated
};

namespace {

// Products, rounded to the element type as torch's are. `room`: for as many elements.
inline void multiply(int64_t type, const float *a, const float *b, int64_t n, float *to, char *room) {
    for (int64_t i = 0; i < n; i += W) store(to + i, in_register(load<Floats>(a + i) * load<Floats>(b + i)));
    if (type == 0) return;
    narrow_all(type, to, n, room);
    widen_all(type, room, n, to);
}

// Rotate the first dims of a head in place: their first half against the second. Each step is rounded as torch's
// operators do, so that a token gets the same numbers as in a run of many. `room`: see `head_floats`.
template <class X>
void rotate_head(const Before &b, int64_t row, typename X::T *head, float *room) {
    const int64_t width = up(b.rotary_dim, 2 * W), half = b.rotary_dim / 2, bytes = bytes_of(b.type);
    float *x = room, *angles = x + width, *straight = angles + width, *across = straight + width;
    char *narrow = (char *)(across + width);
    widen_all(b.type, (const char *)head, b.rotary_dim, x);
    widen_all(b.type, b.cosines + row * b.cosine_row * bytes, b.rotary_dim, angles);
    multiply(b.type, x, angles, b.rotary_dim, straight, narrow);
    widen_all(b.type, b.sines + row * b.sine_row * bytes, b.rotary_dim, angles);
    std::memcpy(across, x, b.rotary_dim * sizeof *x);
    for (int64_t i = 0; i < half; i++) x[i] = -across[i + half];
    std::memcpy(x + half, across, half * sizeof *x);
    multiply(b.type, x, angles, b.rotary_dim, across, narrow);
    for (int64_t i = 0; i < b.rotary_dim; i += W) store(x + i, load<Floats>(straight + i) + load<Floats>(across + i));
    narrow_all(b.type, x, b.rotary_dim, (char *)head);
}

// Multiply a head by a number, in place.
template <class X>
void scale_head(typename X::T *head, int64_t dim, float by) {
    const int64_t whole = dim - dim % (2 * W), rest = dim - whole;
    const auto scaled = [&](Pair part) -> Pair { return {part.a * by, part.b * by}; };
    for (int64_t i = 0; i < whole; i += 2 * W) X::narrow(scaled(X::widen(head + i)), head + i);
    if (rest) narrow<X>(scaled(widen<X>(head + whole, rest)), head + whole, rest);
}

// The room of `rotate_head`: what turns, its angles, two products, and their rounding.
inline int64_t head_floats(int64_t dim) { return 5 * up(dim, 2 * W); }

template <class X>
int64_t before_as(const Before &b) {
    typedef typename X::T T;
    if (norm_as<X>({b.rows, b.width, b.threads, b.type, b.x, b.scratch, b.norm})) return -1;
    const Weights *all = b.all;
    if (products_as<X>({b.rows, b.width, b.threads, b.type, b.scratch, 3, {all[0], all[1], all[2]}})) return -1;
    const bool is_scaled = b.query_scale != 1.0;
    if (!b.rotary_dim && !is_scaled && !b.each[0].weight && !b.each[1].weight) return 0;
    const int64_t heads[] = {all[0].outputs / b.dim, all[1].outputs / b.dim}, every = heads[0] + heads[1];
    const auto work = [&](int64_t i, float *room) {
        const int64_t row = i / every, at = i % every, keys = at >= heads[0];
        const int64_t own = keys ? at - heads[0] : at;
        T *head = (T *)all[keys].out + (row * heads[keys] + own) * b.dim;
        if (b.each[keys].weight) norm_row<X>(b.each[keys], b.dim, head, head);
        if (b.rotary_dim) rotate_head<X>(b, row, head, room);
        if (is_scaled && !keys) scale_head<X>(head, b.dim, (float)b.query_scale);
    };
    const int64_t n = b.rows * every;
    return for_each(n, n * b.dim * (int64_t)sizeof(T), b.threads, head_floats(b.dim), work) ? 0 : -1;
}

// The sum of n elements of two vectors.
template <class X>
void add_all(const char *a, const char *b, int64_t n, char *to) {
    typedef typename X::T T;
    const T *x = (const T *)a, *y = (const T *)b;
    const int64_t whole = n - n % (2 * W), rest = n - whole;
    const auto sum = [](Pair p, Pair q) -> Pair { return {p.a + q.a, p.b + q.b}; };
    for (int64_t i = 0; i < whole; i += 2 * W) X::narrow(sum(X::widen(x + i), X::widen(y + i)), (T *)to + i);
    if (rest) narrow<X>(sum(widen<X>(x + whole, rest), widen<X>(y + whole, rest)), (T *)to + whole, rest);
}

// A norm of every row in place; nothing without weights.
template <class X>
int64_t norm_added(const Behind &b, const Scaled &norm, char *x) {
    if (!norm.weight) return 0;
    return norm_as<X>({b.rows, b.width, b.threads, b.type, x, x, norm});
}

template <class X>
int64_t behind_as(const Behind &b) {
    const int64_t n = b.rows * b.width, bytes = n * (int64_t)sizeof(typename X::T);
    char *y = b.scratch, *part = y + bytes, *between = part + bytes;
    Weights output = b.output, down = b.down;
    output.out = part;
    if (products_as<X>({b.rows, b.attention_width, b.threads, b.type, b.attention, 1, {output}})) return -1;
    if (norm_added<X>(b, b.added[0], part)) return -1;
    add_all<X>(b.x, part, n, y);
    if (norm_as<X>({b.rows, b.width, b.threads, b.type, y, part, b.norm})) return -1;
    if (gated_as<X>({b.rows, b.width, b.threads, b.type, part, between, b.gate, b.up, down, b.activation})) return -1;
    if (norm_added<X>(b, b.added[1], down.out)) return -1;
    add_all<X>(y, down.out, n, down.out);
    return 0;
}

}  // namespace

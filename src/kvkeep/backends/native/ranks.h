// Slot positions: unrotated keys, each rotated to the rank of its token in the head while it is read.
//
// The first 2 F dims of a head turn, dim i against dim F + i. Angles come as rows of F cosines and F sines, in the type
// of the keys, which is how exactly the model knows them.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace {

// A vector of `dim` elements as floats: the first half of what turns, the second half, the rest; each padded to 2 W.
struct Halves {
    int64_t half;
    Pairs part, rest;

    Halves(int64_t dim, int64_t half) : half(half), part(half), rest(dim - 2 * half) {}
    int64_t floats() const { return 2 * part.floats() + rest.floats(); }
};

// The pair i of a vector.
template <class X>
inline Pair piece(const typename X::T *from, Pairs pairs, int64_t i, bool in_place) {
    return in_place ? X::widen(from + pairs.begin(i)) : widen<X>(from, pairs.dim);
}

// Turn two halves by angles, or back by them.
inline void turn(Pair &a, Pair &b, Pair cos, Pair sin) {
    const Pair first = a;
    a = {a.a * cos.a - b.a * sin.a, a.b * cos.b - b.b * sin.b};
    b = {b.a * cos.a + first.a * sin.a, b.b * cos.b + first.b * sin.b};
}

inline void turn_back(Pair &a, Pair &b, Pair cos, Pair sin) {
    const auto whole = [](Floats c, Floats s) {  // 1 where both are 0, in what pads a vector
        const Floats size = c * c + s * s;
        return select(size == 0.0f, all(1.0f), size);
    };
    const Pair first = a, size = {whole(cos.a, sin.a), whole(cos.b, sin.b)};
    a = {(a.a * cos.a + b.a * sin.a) / size.a, (a.b * cos.b + b.b * sin.b) / size.b};
    b = {(b.a * cos.a - first.a * sin.a) / size.a, (b.b * cos.b - first.b * sin.b) / size.b};
}

// A key, turned, as floats.
template <class X, bool IN_PLACE>
inline void turn_key(const typename X::T *key, const typename X::T *angles, Halves halves, float *to) {
    for (int64_t i = 0; i < halves.part.n; i++) {
        Pair a = piece<X>(key, halves.part, i, IN_PLACE), b = piece<X>(key + halves.half, halves.part, i, IN_PLACE);
        turn(a, b, piece<X>(angles, halves.part, i, IN_PLACE), piece<X>(angles + halves.half, halves.part, i, IN_PLACE));
        Float32::narrow(a, to + 2 * i * W);
        Float32::narrow(b, to + halves.part.floats() + 2 * i * W);
    }
    for (int64_t i = 0; i < halves.rest.n; i++)
        Float32::narrow(piece<X>(key + 2 * halves.half, halves.rest, i, halves.rest.in_place()),
                        to + 2 * halves.part.floats() + 2 * i * W);
}

// The same where N pairs make up each half and nothing else is left.
template <class X, int N>
inline void turn_whole_key(const typename X::T *key, const typename X::T *angles, float *to) {
    constexpr int64_t HALF = N * 2 * W;
    for (int i = 0; i < N; i++, key += 2 * W, angles += 2 * W, to += 2 * W) {
        Pair a = X::widen(key), b = X::widen(key + HALF);
        turn(a, b, X::widen(angles), X::widen(angles + HALF));
        Float32::narrow(a, to);
        Float32::narrow(b, to + HALF);
    }
}

// Call with what turns a key: turn(key, angles, to).
template <class X, class Call>
inline void by_halves(Halves halves, const Call &call) {
    typedef const typename X::T *Vector;
    const int64_t pairs = halves.rest.dim == 0 && halves.half % (2 * W) == 0 ? halves.half / (2 * W) : 0;
    if (pairs == 1) call([](Vector key, Vector angles, float *to) { turn_whole_key<X, 1>(key, angles, to); });
    else if (pairs == 2) call([](Vector key, Vector angles, float *to) { turn_whole_key<X, 2>(key, angles, to); });
    else if (halves.part.in_place())
        call([=](Vector key, Vector angles, float *to) { turn_key<X, true>(key, angles, halves, to); });
    else call([=](Vector key, Vector angles, float *to) { turn_key<X, false>(key, angles, halves, to); });
}

// A query, turned back if it was turned, then turned and scaled, as floats. Elements that overlap the pair before are 0.
template <class X>
inline void turn_query(const typename X::T *query, const typename X::T *back, const typename X::T *angles,
                       Halves halves, float scaling, float *to) {
    const auto put = [=](Pair x, float *at) { Float32::narrow({x.a * scaling, x.b * scaling}, at); };
    for (int64_t i = 0; i < halves.part.n; i++) {
        const int64_t begin = halves.part.begin(i), n = halves.part.elements(), overlap = 2 * i * W - begin;
        Pair a = widen<X>(query + begin, n, overlap), b = widen<X>(query + halves.half + begin, n, overlap);
        const auto at = [=](const typename X::T *row) { return piece<X>(row, halves.part, i, halves.part.in_place()); };
        if (back) turn_back(a, b, at(back), at(back + halves.half));
        turn(a, b, at(angles), at(angles + halves.half));
        put(a, to + 2 * i * W);
        put(b, to + halves.part.floats() + 2 * i * W);
    }
    for (int64_t i = 0; i < halves.rest.n; i++) {
        const int64_t begin = halves.rest.begin(i);
        put(widen<X>(query + 2 * halves.half + begin, halves.rest.elements(), 2 * i * W - begin),
            to + 2 * halves.part.floats() + 2 * i * W);
    }
}

// Write what turns of a key without its rotation.
template <class X>
inline void unturn_key(const typename X::T *key, const typename X::T *back, int64_t half, typename X::T *to) {
    const Pairs part(half);
    for (int64_t i = 0; i < part.n; i++) {
        const auto at = [=](const typename X::T *row) { return piece<X>(row, part, i, part.in_place()); };
        Pair a = at(key), b = at(key + half);
        turn_back(a, b, at(back), at(back + half));
        narrow<X>(a, to + part.begin(i), part.elements());
        narrow<X>(b, to + half + part.begin(i), part.elements());
    }
}

// The ranks of a head's tokens, oldest first: a bit for each of the newest positions, with the number of tokens before
// each word of bits, and the sorted positions of tokens that are older.
struct Ranks {
    static constexpr int64_t FLOATS = 7;  // per slot: two words of bits, a number before each, an old position
    int64_t words;                        // room for bits
    uint64_t *bits;
    int32_t *before, *old, first = 0, most = 0;  // `first` and `most`: the positions of the first and the last bit
    int32_t older = 0, tokens = 0;

    Ranks(int64_t slots, float *memory)
        : words(2 * slots), bits((uint64_t *)memory), before((int32_t *)(bits + words)), old(before + words) {}

    void read(const int32_t *positions, int64_t slots) {
        most = 0;
        for (int64_t s = 0; s < slots; s++) most = positions[s] > most ? positions[s] : most;
        first = (int32_t)std::max<int64_t>(0, most - 64 * words + 1);
        const int64_t used = (most - first) / 64 + 1, each = slots / 4;
        std::memset(bits, 0, used * sizeof *bits);
        older = 0;
        for (int64_t s = 0; s < each; s++)  // neighbours share a word, which would have to wait for itself
            for (int64_t part = 0; part < 4; part++) add(positions[part * each + s]);
        for (int64_t s = 4 * each; s < slots; s++) add(positions[s]);
        std::sort(old, old + older);
        tokens = older;
        for (int64_t i = 0; i < used; i++) {
            before[i] = tokens;
            tokens += __builtin_popcountll(bits[i]);
        }
    }

    // The number of tokens at lower positions.
    int64_t of(int32_t position) const {
        if (position > most) return tokens;
        const int64_t at = (int64_t)position - first;
        if (at < 0) return std::lower_bound(old, old + older, position) - old;
        return before[at / 64] + __builtin_popcountll(bits[at / 64] & (((uint64_t)1 << at % 64) - 1));
    }

    // The ranks of n slots; of an empty one, any. Tokens that follow one another have ranks that do, too.
    void of_each(const int32_t *positions, int64_t n, int64_t *to) const {
        const int32_t first = positions[0];
        bool follow = first >= 0;
        for (int64_t i = 1; i < n; i++) follow &= positions[i] == first + i;
        const int64_t rank = of(first);
        for (int64_t i = 0; i < n; i++) to[i] = follow ? rank + i : of(positions[i]);
    }

   private:
    void add(int32_t position) {
        const int64_t at = (int64_t)position - first;
        if (at >= 0) bits[at / 64] |= (uint64_t)1 << at % 64;
        else if (position >= 0) old[older++] = position;
    }
};

}  // namespace

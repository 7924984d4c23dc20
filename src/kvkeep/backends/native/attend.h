// Attention of one token per row over unordered slots, and the policy's statistic.
//
// Keys are read once and values once, for all query heads that share them. The interface is plain C: one struct of
// 8-byte fields, which ops.py and its neighbours pack in the same order; a result of -1 means that there was no memory. Strides count
// elements, and the last axis of every tensor is dense. Axis letters in comments are those of types.py.

#pragma once

#include "heads.h"
#include "ranks.h"
#include "vectors.h"

enum Kind { NOTHING, MASS, MASS_AND_LAST, MASS_AND_LOW };

extern "C" struct Attend {
    int64_t rows, kv_heads, group, slots, dim, value_dim, threads;
    int64_t type;  // of query, keys, values and output: 0 float32, 1 bfloat16, 2 float16
    const char *query;
    int64_t query_row, query_head;
    const char *keys;
    int64_t key_row, key_head, key_slot;
    const char *values;
    int64_t value_row, value_head, value_slot;
    const int32_t *positions;
    int64_t position_row, position_head;
    const int64_t *now;  // the queries' positions, -1 for padding
    int64_t now_row;
    char *out;           // dense
    const float *sinks;  // per query head, or null
    int64_t window;      // 0 for none
    int64_t kind;
    float *mass, *extra;     // dense; extra: the newest row's mass, or low
    const int64_t *counted;  // per row, above 0 if it counts; null: all rows count if `counts`
    int64_t counts;
    const float *gains;  // per row; null: `gain` for all
    int64_t has_gain;
    const int64_t *newest;  // per row, the position from which decay counts; null: `last` for all
    int64_t last, live;
    double scaling, softcap, gain, decay, theta;  // softcap 0 for none
    const char *angles;  // of ranks 0 to `slots`, dense; null where keys are attended as they are
    const char *back;    // of the queries' positions, dense; null if queries are unrotated
    int64_t half;        // F of ranks.h
    const int64_t *starts, *sizes;  // where each head's slots begin in a pool of keys and values, and how many it has,
                                    // dense; null where all heads have `slots`, which begin where the head does
};

namespace {

constexpr int GROUP = 4;         // query heads that are worked on at a time
constexpr int SPAN = 128;        // slots whose values stay in the nearest cache while all query heads and dims use them
constexpr int64_t AHEAD = 4096;  // bytes of keys or values that are fetched ahead of their use

// The scratch memory of one head: offsets in floats.
struct Layout {
    Pairs dim, value_dim;
    Halves halves;
    int64_t slots, width, query, logits, tempered, out, shown, scale, turned, ranks, size;

    explicit Layout(const Attend &a)
        : dim(a.dim), value_dim(a.value_dim), halves(a.dim, a.half), slots(up(a.slots, W)) {
        width = a.angles ? halves.floats() : dim.floats();  // floats of a query
        query = 0;
        logits = query + a.group * width;
        tempered = logits + a.group * slots;
        out = tempered + (a.has_gain ? a.group * slots : 0);
        shown = out + a.group * value_dim.floats();
        scale = shown + slots;
        turned = up(scale + 2 * a.group, W);
        ranks = turned + (a.angles ? W * width : 0);
        size = ranks + (a.angles ? Ranks::FLOATS * slots : 0);
    }
};

// Fetch n elements into the second-level cache; fetching into the first does not pay. The address may be invalid.
template <class T>
inline void fetch(const T *from, int64_t n) {
    for (int64_t i = 0; i < n * (int64_t)sizeof(T); i += 64) __builtin_prefetch((const char *)from + i, 0, 2);
}

// Keys or values, one behind the other.
template <class T>
struct Rows {
    const T *first;
    int64_t stride;

    const T *at(int64_t i) const { return first + i * stride; }
    Rows from(int64_t i) const { return {at(i), stride}; }
};

template <class X>
inline int64_t rows_ahead(int64_t dim) {
    return AHEAD / (dim * (int64_t)sizeof(typename X::T));
}

// Dot products of N queries with the W keys of a block, of which n exist; the last one is repeated for the others.
// `later` are the rows to fetch ahead; none if they start nowhere.
template <class X, int N, bool IN_PLACE>
inline void dots(const float *query, Pairs pairs, Rows<typename X::T> keys, int64_t n, Rows<typename X::T> later,
                 Floats *logits) {
    Floats parts[N][W / TILE];
    for (int s = 0; s < W; s += TILE) {
        const typename X::T *key[TILE];
        for (int i = 0; i < TILE; i++) key[i] = keys.at(s + i < n ? s + i : n - 1);
        if (later.first)
            for (int i = 0; i < TILE; i++) fetch(later.at(s + i), pairs.dim);
        Floats acc[N][TILE] = {};
        const auto add = [&](int64_t at, int64_t begin) {
            Pair k[TILE];
            for (int i = 0; i < TILE; i++)
                k[i] = IN_PLACE ? X::widen(key[i] + begin) : widen<X>(key[i], pairs.dim);
            for (int g = 0; g < N; g++) {
                const float *q = query + g * pairs.floats() + at;
                const Floats a = in_register(load<Floats>(q)), b = in_register(load<Floats>(q + W));
                for (int i = 0; i < TILE; i++) acc[g][i] += a * k[i].a;
                for (int i = 0; i < TILE; i++) acc[g][i] += b * k[i].b;
            }
        };
        int64_t d = 0;
        for (; d + 2 * W <= pairs.dim; d += 2 * W) add(d, d);
        if (d < pairs.dim) add(d, pairs.dim - 2 * W);
        for (int g = 0; g < N; g++) parts[g][s / TILE] = gather<TILE, W>(acc[g]);
    }
    for (int g = 0; g < N; g++) logits[g] = gather<W / TILE, W / TILE>(parts[g]);
}

// Add the values of n slots, weighted for N query heads, to the outputs: M pairs of the head dim. A hidden slot is not
// read, as it may hold NaN.
template <class X, int N, int M, bool IN_PLACE>
inline void mix(const float *p, int64_t slots, const int32_t *shown, Rows<typename X::T> values, int64_t n, Pairs pairs,
                int64_t first, float *out) {
    const int64_t ahead = rows_ahead<X>(pairs.dim);
    int64_t begin[M];
    for (int m = 0; m < M; m++) begin[m] = pairs.begin(first + m);
    Pair acc[N][M];
    for (int g = 0; g < N; g++)
        for (int m = 0; m < M; m++) acc[g][m] = Float32::widen(out + g * pairs.floats() + 2 * (first + m) * W);
    for (int64_t s = 0; s < n; s++) {
        if (!shown[s]) continue;
        const typename X::T *value = values.at(s);
        for (int m = 0; m < M; m++) fetch(values.at(s + ahead) + begin[m], 2 * W);
        Pair v[M];
        for (int m = 0; m < M; m++)
            v[m] = IN_PLACE ? X::widen(value + begin[m]) : widen<X>(value, pairs.dim);
        for (int g = 0; g < N; g++) {
            const Floats weight = all(p[g * slots + s]);
            for (int m = 0; m < M; m++) {
                acc[g][m].a += weight * v[m].a;
                acc[g][m].b += weight * v[m].b;
            }
        }
    }
    for (int g = 0; g < N; g++)
        for (int m = 0; m < M; m++) Float32::narrow(acc[g][m], out + g * pairs.floats() + 2 * (first + m) * W);
}

// Call with a compile-time number of query heads, GROUP at a time.
template <class Call>
inline void by_group(int64_t group, const Call &call) {
    int64_t g = 0;
    for (; g + GROUP <= group; g += GROUP) call(g, std::integral_constant<int, GROUP>());
    if (group - g == 3) call(g, std::integral_constant<int, 3>());
    if (group - g == 2) call(g, std::integral_constant<int, 2>());
    if (group - g == 1) call(g, std::integral_constant<int, 1>());
}

// The attention of the query heads of one row that share a KV head.
template <class X>
class Head {
    typedef typename X::T T;
    const Attend &a;
    const Layout at;
    const int64_t row, head, now, start, slots;
    const int32_t *positions;
    float *query, *logits, *tempered, *out, *scale, *turned, *const mass, *const extra;
    int32_t *shown;
    Ranks ranks;
    float gain;
    bool tempers;         // whether the reported probabilities differ from those that attention uses
    int64_t visible = 0;  // slots whose token is not after the query, sliding windows aside

   public:
    // `mass` and `extra`: where the report of this head goes; null if there is none.
    Head(const Attend &a, int64_t index, float *scratch, float *mass, float *extra)
        : a(a), at(a), row(index / a.kv_heads), head(index % a.kv_heads), now(a.now[row * a.now_row]),
          start(a.starts ? a.starts[index] : 0), slots(a.sizes ? a.sizes[index] : a.slots),
          positions(a.positions + row * a.position_row + head * a.position_head), query(scratch + at.query),
          logits(scratch + at.logits), tempered(scratch + at.tempered), out(scratch + at.out),
          scale(scratch + at.scale), turned(scratch + at.turned), mass(mass), extra(extra),
          shown((int32_t *)(scratch + at.shown)), ranks(a.slots, scratch + at.ranks),
          gain(a.gains ? a.gains[row] : (float)a.gain), tempers(a.has_gain && (gain != 1.0f || a.sinks)) {}

    void run() {
        std::memset(out, 0, a.group * at.value_dim.floats() * sizeof *out);
        if (now >= 0) {
            if (a.angles) {
                ranks.read(positions, slots);
                read_unrotated_query();
            } else {
                read_query();
            }
            score();
            for (int64_t g = 0; g < a.group; g++) soften(g);
            weigh_values();
        }
        write_out();
        if (a.kind != NOTHING) report(now < 0 ? 0.0f : weight());
    }

   private:
    void read_query() {
        const T *from = (const T *)a.query + row * a.query_row + head * a.group * a.query_head;
        for (int64_t g = 0; g < a.group; g++)
            for (int64_t i = 0; i < at.dim.n; i++) {
                const int64_t begin = at.dim.begin(i);
                const Pair q = widen<X>(from + g * a.query_head + begin, at.dim.elements(), 2 * i * W - begin);
                Float32::narrow({q.a * (float)a.scaling, q.b * (float)a.scaling},
                                query + g * at.dim.floats() + 2 * i * W);
            }
    }

    const T *angles(int64_t rank) const { return (const T *)a.angles + rank * 2 * a.half; }

    void read_unrotated_query() {
        const T *from = (const T *)a.query + row * a.query_row + head * a.group * a.query_head;
        const T *back = a.back ? (const T *)a.back + row * 2 * a.half : nullptr;
        const T *own = angles(ranks.of((int32_t)now));
        for (int64_t g = 0; g < a.group; g++)
            turn_query<X>(from + g * a.query_head, back, own, at.halves, (float)a.scaling, query + g * at.width);
    }

    // Turn the keys of a block that starts with slot s.
    void turn_keys(int64_t s, Rows<T> block, Rows<T> later) {
        const int64_t n = slots - s < W ? slots - s : W;
        for (int64_t i = 0; i < n; i++) {
            fetch(later.at(i), a.dim);
            const T *own = angles(ranks.of(positions[s + i]));
            if (at.halves.part.in_place())
                turn_key<X, true>(block.at(i), own, at.halves, turned + i * at.width);
            else
                turn_key<X, false>(block.at(i), own, at.halves, turned + i * at.width);
        }
    }

    Rows<T> keys() const {
        return {(const T *)a.keys + row * a.key_row + head * a.key_head + start * a.key_slot, a.key_slot};
    }

    Rows<T> values() const {
        return {(const T *)a.values + row * a.value_row + head * a.value_head + start * a.value_slot, a.value_slot};
    }

    Ints positions_at(int64_t s) const { return load<Ints>(positions + s, slots - s, -1); }

    // Logits of every block in which the query sees a slot.
    void score() {
        const Rows<T> keys = this->keys(), values = this->values();
        const int64_t before = a.window && now >= a.window ? now - a.window : -1;
        Ints count = {};
        for (int64_t s = 0; s < slots; s += W) {
            const Ints position = positions_at(s), past = (position >= 0) & (position <= (int32_t)now);
            const Ints show = past & (position > (int32_t)before);
            count -= past;
            store(shown + s, show);
            if (!any(show)) continue;
            const int64_t ahead = s + rows_ahead<X>(a.dim);
            const Rows<T> block = keys.from(s);
            const Rows<T> later = ahead < slots ? keys.from(ahead) : values.from(ahead - slots);
            if (a.angles) turn_keys(s, block, later);
            by_group(a.group, [&](int64_t g, auto n) {
                Floats found[n.value];
                const float *q = query + g * at.width;
                if (a.angles)
                    dots<Float32, n.value, true>(q, Pairs(at.width), {turned, at.width}, slots - s, {}, found);
                else if (at.dim.in_place())
                    dots<X, n.value, true>(q, at.dim, block, slots - s, later, found);
                else
                    dots<X, n.value, false>(q, at.dim, block, slots - s, later, found);
                for (int i = 0; i < n.value; i++) store(logits + (g + i) * at.slots + s, found[i]);
            });
        }
        visible = sum(count);
    }

    // Turn logits of a query head into e^(logit - largest), 0 where hidden; times `scale` they are probabilities.
    void soften(int64_t g) {
        float *x = logits + g * at.slots, *t = tempered + g * at.slots;
        Floats most = all(-INFINITY), total = {}, total_tempered = {};
        for (int64_t s = 0; s < slots; s += W) {
            Floats logit = load<Floats>(x + s);
            if (a.softcap != 0.0) {
                logit = tanh(logit / (float)a.softcap) * (float)a.softcap;
                store(x + s, logit);
            }
            most = select(load<Ints>(shown + s) & (logit > most), logit, most);
        }
        const float peak = largest(most), sink = a.sinks ? a.sinks[head * a.group + g] : -INFINITY;
        const float top = sink > peak ? sink : peak;
        for (int64_t s = 0; s < slots; s += W) {
            const Floats logit = load<Floats>(x + s);
            const Ints show = load<Ints>(shown + s);
            const Floats e = select(show, exp(logit - top), Floats{});
            total += e;
            store(x + s, e);
            if (!tempers) continue;
            const Floats outside = select(past_at(s), all(std::pow(0.0f, gain)), Floats{});  // p is 0 there
            const Floats power = select(show, exp((logit - peak) * gain), outside);
            total_tempered += power;
            store(t + s, power);
        }
        const float whole = sum(total) + (sink == -INFINITY ? 0.0f : std::exp(sink - top));
        scale[g] = whole == 0.0f ? 0.0f : 1.0f / whole;  // 0: the query sees nothing
        const float whole_tempered = sum(total_tempered);
        scale[a.group + g] = whole_tempered == 0.0f ? 0.0f : 1.0f / whole_tempered;
    }

    Ints past_at(int64_t s) const {
        const Ints position = positions_at(s);
        return (position >= 0) & (position <= (int32_t)now);
    }

    void weigh_values() {
        for (int64_t s = 0; s < slots; s += SPAN) {
            const Rows<T> block = values().from(s);
            const int64_t n = slots - s < SPAN ? slots - s : SPAN;
            by_group(a.group, [&](int64_t g, auto heads) {
                const auto add = [&](int64_t first, auto pairs, auto in_place) {
                    mix<X, heads.value, pairs.value, in_place.value>(logits + g * at.slots + s, at.slots, shown + s,
                                                                     block, n, at.value_dim, first,
                                                                     out + g * at.value_dim.floats());
                };
                constexpr int M = TILE / 2;
                int64_t i = 0;
                if (!at.value_dim.in_place()) return add(0, std::integral_constant<int, 1>(), std::false_type());
                for (; i + M <= at.value_dim.n; i += M) add(i, std::integral_constant<int, M>(), std::true_type());
                for (; i < at.value_dim.n; i++) add(i, std::integral_constant<int, 1>(), std::true_type());
            });
        }
    }

    void write_out() {
        const Pairs pairs = at.value_dim;
        for (int64_t g = 0; g < a.group; g++) {
            T *to = (T *)a.out + ((row * a.kv_heads + head) * a.group + g) * a.value_dim;
            const float factor = now < 0 ? 0.0f : scale[g];
            for (int64_t i = 0; i < pairs.n; i++) {
                const Pair x = Float32::widen(out + g * pairs.floats() + 2 * i * W);
                narrow<X>({x.a * factor, x.b * factor}, to + pairs.begin(i), pairs.elements());
            }
        }
    }

    // The weight of this row in the report; 0 if it does not count.
    float weight() const {
        const bool counts = a.counted ? a.counted[row] > 0 : a.counts != 0;
        const int64_t ago = newest() - now;
        return !counts ? 0.0f : ago <= 0 ? 1.0f : (float)std::pow(a.decay, (double)ago);
    }

    int64_t newest() const { return a.newest ? a.newest[row] : a.last; }

    void report(float weight) {
        if (weight == 0.0f) {
            std::memset(mass, 0, a.slots * sizeof *mass);
            if (a.kind != MASS) std::memset(extra, 0, a.slots * sizeof *extra);
            return;
        }
        average(mass);
        std::memset(mass + slots, 0, (a.slots - slots) * sizeof *mass);
        if (a.kind != MASS) std::memset(extra + slots, 0, (a.slots - slots) * sizeof *extra);
        if (a.kind == MASS_AND_LAST)
            for (int64_t s = 0; s < slots; s++) extra[s] = newest() == now ? mass[s] : 0.0f;
        if (a.kind == MASS_AND_LOW) {
            const Floats n = all((float)(a.live ? visible : now + 1)), theta = all((float)a.theta);
            for (int64_t s = 0; s < slots; s += W) {
                const Floats p = load<Floats>(mass + s, slots - s, 0.0f);
                store(extra + s, select(past_at(s) & (p * n * theta < 1.0f), all(1.0f), Floats{}), slots - s);
            }
        }
        if (weight != 1.0f)
            for (int64_t s = 0; s < slots; s++) mass[s] *= weight;
    }

    // The mean of the query heads' probabilities, under the gain if there is one.
    void average(float *mass) const {
        const float *p = tempers ? tempered : logits, *factor = scale + (tempers ? a.group : 0);
        for (int64_t s = 0; s < slots; s += W) {
            Floats total = {};
            for (int64_t g = 0; g < a.group; g++) total += load<Floats>(p + g * at.slots + s) * factor[g];
            store(mass + s, total / (float)a.group, slots - s);
        }
    }
};

}  // namespace

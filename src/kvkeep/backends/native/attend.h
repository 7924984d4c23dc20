// Attention of one token per row over unordered slots, and the policy's statistic.
//
// Keys are read once and values once, for all query heads that share them.

#pragma once

#include "inner.h"
#include "ranks.h"
#include "report.h"

namespace {

// The attention of the query heads of one row that share a KV head.
template <class X>
class Head : Reporter {
    typedef typename X::T T;
    const Pairs dim, value_dim;
    const Halves halves;
    float *turned;
    Ranks ranks;

   public:
    static Layout layout(const Attend &a) {
        const int64_t width = a.angles ? Halves(a.dim, a.half).floats() : Pairs(a.dim).floats();
        const int64_t own = a.angles ? W * width + Ranks::FLOATS * up(a.slots, W) : 0;
        return Layout(a, width, Pairs(a.value_dim).floats(), own);
    }

    Head(const Attend &a, int64_t index, float *scratch, float *mass, float *extra)
        : Reporter(a, layout(a), index, scratch, mass, extra), dim(a.dim), value_dim(a.value_dim),
          halves(a.dim, a.half), turned(scratch + at.own), ranks(a.slots, turned + W * at.width) {}

    void run() {
        std::memset(out, 0, a.group * at.value_width * sizeof *out);
        if (now >= 0) {
            if (a.angles) {
                ranks.read(positions, slots);
                read_unrotated_query();
            } else {
                read_query();
            }
            score();
            soften();
            weigh_values();
        }
        write_out();
        if (a.kind != NOTHING) report(now < 0 ? 0.0f : weight());
    }

   private:
    void read_query() {
        const T *from = (const T *)a.query + row * a.query_row + head * a.group * a.query_head;
        for (int64_t g = 0; g < a.group; g++)
            for (int64_t i = 0; i < dim.n; i++) {
                const int64_t begin = dim.begin(i);
                const Pair q = widen<X>(from + g * a.query_head + begin, dim.elements(), 2 * i * W - begin);
                Float32::narrow({q.a * (float)a.scaling, q.b * (float)a.scaling},
                                query + g * at.width + 2 * i * W);
            }
    }

    const T *angles(int64_t rank) const { return (const T *)a.angles + rank * 2 * a.half; }

    void read_unrotated_query() {
        const T *from = (const T *)a.query + row * a.query_row + head * a.group * a.query_head;
        const T *back = a.back ? (const T *)a.back + row * 2 * a.half : nullptr;
        const T *own = angles(ranks.of((int32_t)now));
        for (int64_t g = 0; g < a.group; g++)
            turn_query<X>(from + g * a.query_head, back, own, halves, (float)a.scaling, query + g * at.width);
    }

    // Turn the keys of a block that starts with slot s.
    void turn_keys(int64_t s, Rows<T> block, Rows<T> later) {
        const int64_t n = slots - s < W ? slots - s : W;
        int64_t found[W];
        ranks.of_each(positions + s, n, found);
        by_halves<X>(halves, [&](const auto &turn) {
            for (int64_t i = 0; i < n; i++) {
                fetch(later.at(i), a.dim);
                turn(block.at(i), angles(found[i]), turned + i * at.width);
            }
        });
    }

    Rows<T> keys() const {
        return {(const T *)a.keys + row * a.key_row + head * a.key_head + start * a.key_slot, a.key_slot};
    }

    Rows<T> values() const {
        return {(const T *)a.values + row * a.value_row + head * a.value_head + start * a.value_slot, a.value_slot};
    }

    // Logits of every block in which the query sees a slot.
    void score() {
        const Rows<T> keys = this->keys(), values = this->values();
        each_block([&](int64_t s) {
            const int64_t ahead = s + rows_ahead<X>(a.dim);
            const Rows<T> block = keys.from(s);
            const Rows<T> later = ahead < slots ? keys.from(ahead) : values.from(ahead - slots);
            if (a.angles) turn_keys(s, block, later);
            by_group(a.group, [&](int64_t g, auto n) {
                Floats found[n.value];
                const float *q = query + g * at.width;
                if (a.angles)
                    dots<Float32, n.value, true>(q, at.width, Pairs(at.width), {turned, at.width}, slots - s, {}, found);
                else if (dim.in_place())
                    dots<X, n.value, true>(q, at.width, dim, block, slots - s, later, found);
                else
                    dots<X, n.value, false>(q, at.width, dim, block, slots - s, later, found);
                for (int i = 0; i < n.value; i++) store(logits + (g + i) * at.slots + s, found[i]);
            });
        });
    }

    void weigh_values() {
        for (int64_t s = 0; s < slots; s += SPAN) {
            const Rows<T> block = values().from(s);
            const int64_t n = slots - s < SPAN ? slots - s : SPAN;
            by_group(a.group, [&](int64_t g, auto heads) {
                by_pairs(value_dim, [&](int64_t first, auto pairs, auto in_place) {
                    mix<X, heads.value, pairs.value, in_place.value>(logits + g * at.slots + s, at.slots, shown + s,
                                                                     block, n, value_dim, first, at.value_width,
                                                                     out + g * at.value_width);
                });
            });
        }
    }

    void write_out() {
        for (int64_t g = 0; g < a.group; g++) {
            T *to = (T *)a.out + ((row * a.kv_heads + head) * a.group + g) * a.value_dim;
            const float factor = now < 0 ? 0.0f : scale[g];
            for (int64_t i = 0; i < value_dim.n; i++) {
                const Pair x = Float32::widen(out + g * at.value_width + 2 * i * W);
                narrow<X>({x.a * factor, x.b * factor}, to + value_dim.begin(i), value_dim.elements());
            }
        }
    }
};

}  // namespace

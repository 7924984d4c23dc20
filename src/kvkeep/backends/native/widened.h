// Attention over slots that hold codes: products of codes that are widened to floats in registers.
//
// Each product with a group of codes is multiplied with the group's scale once: a key's after the sum, a value's before.
// An offset belongs to all channels of a group alike: a key's meets the sum of the query's channels, and a value's is
// added to the output's channels at the end.

#pragma once

#include "codes.h"
#include "inner.h"
#include "report.h"

namespace {

// One row's query heads that share a KV head whose slots hold codes. A query and an output have the order of widened
// codes.
class Widened : protected Reporter {
   protected:
    const Grouping keys, values;
    float *const query_sums, *const shifts;  // of each query head: sums of its query's groups, and what is added to its
                                             // output's

    Widened(const Attend &a, Layout layout, int64_t index, float *scratch, float *mass, float *extra)
        : Reporter(a, layout, index, scratch, mass, extra), keys(a.key_codes, a.dim),
          values(a.value_codes, a.value_dim), query_sums(scratch + at.own), shifts(query_sums + a.group * keys.groups) {}

    template <class C>
    Rows<typename C::T> key_rows() const {
        typedef typename C::T T;
        return {(const T *)a.keys + row * a.key_row + head * a.key_head + start * a.key_slot, a.key_slot};
    }

    template <class C>
    Rows<typename C::T> value_rows() const {
        typedef typename C::T T;
        return {(const T *)a.values + row * a.value_row + head * a.value_head + start * a.value_slot, a.value_slot};
    }

    const uint16_t *scales(const Coded &coded, int64_t s) const {
        const int64_t at = row * coded.scale_row + head * coded.scale_head + (start + s) * coded.scale_slot;
        return (const uint16_t *)coded.scales + at;
    }

    static int64_t query_floats(const Attend &a) { return Grouping(a.key_codes, a.dim).floats(); }
    static int64_t output_floats(const Attend &a) { return Grouping(a.value_codes, a.value_dim).floats(); }
    static int64_t own_floats(const Attend &a) {
        return up(a.group * (Grouping(a.key_codes, a.dim).groups + Grouping(a.value_codes, a.value_dim).groups), W);
    }

    // Keep the sums of a query's groups, which meet the offsets of keys.
    void put_sums(int64_t g, const float *from) {
        if (keys.bits == 8) return;
        for (int64_t j = 0; j < keys.groups; j++, from += keys.group) {
            Floats total = {};
            for (int64_t i = 0; i < keys.group; i += W) total += load<Floats>(from + i, keys.group - i, 0.0f);
            query_sums[g * keys.groups + j] = sum(total);
        }
    }

    // Keep a query in its own order.
    void put_query(int64_t g, const float *from) {
        float *to = query + g * at.width;
        put_sums(g, from);
        std::memset(to, 0, at.width * sizeof *to);
        keys.each_run([&](int64_t i, int64_t channel, int64_t n) {
            std::memcpy(to + i, from + channel, n * sizeof *to);
        });
    }

    void take_output(int64_t g, float *to) const {
        const float *from = out + g * at.value_width;
        values.each_run([&](int64_t i, int64_t channel, int64_t n) {
            std::memcpy(to + channel, from + i, n * sizeof *to);
        });
        if (values.bits == 8) return;
        for (int64_t j = 0; j < values.groups; j++)
            for (int64_t i = 0; i < values.group; i++) to[j * values.group + i] += shifts[g * values.groups + j];
    }

    // Logits of every block in which the query sees a slot.
    template <class C>
    void score() {
        typedef Rows<typename C::T> Codes;
        const Codes first = key_rows<C>();
        const int64_t ahead = rows_ahead<C>(keys.groups * keys.bytes);
        const Pairs pairs = keys.pairs;
        each_block([&](int64_t s) {
            const Codes later = first.from(std::min(s + ahead, slots - 1));
            by_group(a.group, [&](int64_t g, auto n) {
                Floats found[n.value], total[n.value] = {};
                for (int64_t j = 0; j < keys.groups; j++) {
                    const float *q = query + g * at.width + j * pairs.floats();
                    const Codes block = {first.at(s) + j * keys.bytes, a.key_slot};
                    const Codes next = {later.first + j * keys.bytes, a.key_slot};
                    if (pairs.in_place())
                        dots<C, n.value, true>(q, at.width, pairs, block, slots - s, next, found);
                    else
                        dots<C, n.value, false>(q, at.width, pairs, block, slots - s, next, found);
                    const Scaling by = key_scalings<C>(s, j);
                    for (int i = 0; i < n.value; i++)
                        total[i] += scaled<C>(found[i], 1.0f, by, query_sums[(g + i) * keys.groups + j]);
                }
                for (int i = 0; i < n.value; i++) store(logits + (g + i) * at.slots + s, total[i]);
            });
        });
    }

    template <class C>
    void weigh_values() {
        typedef Rows<typename C::T> Codes;
        const Codes first = value_rows<C>();
        const Pairs pairs = values.pairs;
        float weights[GROUP * SPAN];
        std::memset(shifts, 0, a.group * values.groups * sizeof *shifts);
        for (int64_t s = 0; s < slots; s += SPAN) {
            const int64_t n = slots - s < SPAN ? slots - s : SPAN;
            by_group(a.group, [&](int64_t g, auto heads) {
                for (int64_t j = 0; j < values.groups; j++) {
                    scale_weights<C, heads.value>(g, s, n, j, weights);
                    const Codes block = {first.at(s) + j * values.bytes, a.value_slot};
                    float *to = out + g * at.value_width + j * pairs.floats();
                    by_pairs(pairs, [&](int64_t pair, auto count, auto in_place) {
                        mix<C, heads.value, count.value, in_place.value>(weights, SPAN, shown + s, block, n, pairs,
                                                                         pair, at.value_width, to);
                    });
                }
            });
        }
    }

    // The scalings of group j of a block of keys.
    template <class C>
    Scaling key_scalings(int64_t s, int64_t j) const {
        return scalings_of<C>(scales(a.key_codes, s) + j * C::HALVES, a.key_codes.scale_slot, slots - s);
    }

    // Products of a query's group, in a unit, with codes as products with what the codes stand for.
    template <class C>
    static Floats scaled(Floats products, float unit, const Scaling &by, float query_sum) {
        const Floats found = products * (by.scale * unit);
        return C::HALVES == 1 ? found : found + by.offset * query_sum;
    }

   private:
    // The weights of N query heads for group j of the values of n slots. What they weigh of the offsets is shifted.
    template <class C, int N>
    void scale_weights(int64_t g, int64_t s, int64_t n, int64_t j, float *weights) const {
        Floats shift[N] = {};
        for (int64_t t = 0; t < n; t += W) {
            const uint16_t *halves = scales(a.value_codes, s + t) + j * C::HALVES;
            const Scaling by = scalings_of<C>(halves, a.value_codes.scale_slot, n - t);
            const Floats offset = select(load<Ints>(shown + s + t), by.offset, Floats{});  // a hidden one may be NaN
            for (int i = 0; i < N; i++) {
                const Floats weight = load<Floats>(logits + (g + i) * at.slots + s + t);
                store(weights + i * SPAN + t, weight * by.scale);
                shift[i] += weight * offset;
            }
        }
        if (C::HALVES == 2)
            for (int i = 0; i < N; i++) shifts[(g + i) * values.groups + j] += sum(shift[i]);
    }
};

}  // namespace

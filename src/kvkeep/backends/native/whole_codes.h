// Attention over slots that hold codes: keys multiplied with whole numbers, see whole.h.

#pragma once

#include "whole.h"
#include "widened.h"

#ifdef KVKEEP_WHOLE

namespace {

// Products of keys as they are; values are widened. A query is steps of signed bytes, those of all query heads beside
// one another, and, for each group, the sums to begin with and the unit.
class Whole : protected Widened {
    const Steps steps;
    Ints *const turned;  // the keys of TOGETHER blocks

    static constexpr int TOGETHER = 2;  // blocks that share the words of a query

    static int64_t all_steps(const Attend &a) {
        const Grouping codes(a.key_codes, a.dim);
        return codes.groups * Steps(codes).each;
    }

   protected:
    static int64_t query_floats(const Attend &a) {
        return BYTES * all_steps(a) + (BYTES + 1) * Grouping(a.key_codes, a.dim).groups;
    }

    static int64_t own_floats(const Attend &a) { return Widened::own_floats(a) + TOGETHER * W * all_steps(a); }

    Whole(const Attend &a, Layout layout, int64_t index, float *scratch, float *mass, float *extra)
        : Widened(a, layout, index, scratch, mass, extra), steps(keys), 
          turned((Ints *)(scratch + at.own + Widened::own_floats(a))) {}

    // Keep a query in its own order.
    void put_query(int64_t g, const float *from) {
        put_sums(g, from);
        for (int64_t j = 0; j < keys.groups; j++, from += keys.group) {
            const Unit unit(most_of(from, keys.group));
            int32_t *to = words(j) + g * BYTES, *begin = to_begin_with(g, j);
            Ints sums[BYTES] = {};
            for (int64_t first = 0; first < keys.group; first += keys.bytes, to += steps.half * step_words())
                for (int64_t i = 0; i < keys.bytes; i += W) {
                    const Ints numbers = unit.numbers(load<Floats>(from + first + i, keys.bytes - i, 0.0f));
                    const Ints bytes = signed_bytes(numbers);
                    put_bytes(bytes, steps.half - i / 4, step_words(), to + i / 4 * step_words());
                    for (int p = 0; p < BYTES; p++) sums[p] += (bytes << (24 - 8 * p)) >> 24;
                }
            for (int p = 0; p < BYTES; p++) begin[p] = keys.bits == 8 ? -SIGN * sum(sums[p]) : 0;
            std::memcpy(begin + BYTES, &unit.size, sizeof unit.size);
        }
    }

    // Logits of every block in which the query sees a slot.
    template <class C>
    void score() {
        const auto first = key_rows<C>();
        const int64_t ahead = AHEAD / (keys.groups * keys.bytes);
        int64_t found[TOGETHER];
        int n = 0;
        each_block([&](int64_t s) {
            turn_block<C>(first.from(s), slots - s, turned + n * block_steps());
            found[n++] = s;
            if (n == TOGETHER) score_blocks<C, TOGETHER>(found, ahead), n = 0;
        });
        if (n) score_blocks<C, 1>({found[0]}, ahead);
    }

   private:
    int64_t block_steps() const { return keys.groups * steps.each; }
    int64_t step_words() const { return a.group * BYTES; }
    int32_t *words(int64_t j) const { return (int32_t *)query + j * steps.each * step_words(); }

    int32_t *to_begin_with(int64_t g, int64_t j) const {
        return words(keys.groups) + (g * keys.groups + j) * (BYTES + 1);
    }

    // Turn the keys of a block, of which n exist; the last one is repeated for the others.
    template <class C>
    void turn_block(Rows<typename C::T> block, int64_t n, Ints *to) {
        for (int64_t j = 0; j < keys.groups; j++, to += steps.each) {
            const auto *first = (const uint8_t *)block.first + j * keys.bytes;
            if (n >= W) turn_group<C>([=](int64_t i) { return first + i * block.stride; }, keys, steps, to);
            else turn_group<C>([=](int64_t i) { return first + std::min(i, n - 1) * block.stride; }, keys, steps, to);
        }
    }

    // Lines of memory to fetch, EACH beside each step of other work: all at once would have to wait for one another.
    template <int EACH>
    struct Ahead {
        const char *first;
        int64_t lines;

        // Inlined early, or GCC takes it for a function without effects.
        [[gnu::always_inline]] void operator()(int64_t step) const {
            for (int64_t i = EACH * step; i < EACH * step + EACH; i++)
                if (i < lines) __builtin_prefetch(first + 64 * i, 0, 2);
        }
    };

    // The keys of B later blocks or, behind the last one, values; nothing if they do not lie side by side.
    template <int B>
    Ahead<B> keys_ahead(int64_t s, int64_t ahead) const {
        const int64_t bytes = keys.groups * keys.bytes, value_bytes = values.groups * values.bytes;
        const int64_t later = s + ahead;
        const char *key = (const char *)key_rows<Code8>().at(later);
        if (later < slots) return {key, a.key_slot == bytes ? B * W * bytes / 64 : 0};
        const char *value = (const char *)value_rows<Code8>().at(later - slots);
        return {value, a.value_slot == value_bytes ? B * W * value_bytes / 64 : 0};
    }

    // Logits of B blocks, whose first slots are given and whose keys are turned. `ahead`: slots up to those to fetch.
    template <class C, int B>
    void score_blocks(const int64_t (&first)[B], int64_t ahead) {
        const Ahead<B> later = keys_ahead<B>(first[0], ahead);
        by_group(a.group, [&](int64_t g, auto n) {
            score_group<C, B, n.value>(g, first, turned, g ? Ahead<B>{} : later);
        });
    }

    template <class C, int B, int N>
    void score_group(int64_t g, const int64_t (&first)[B], const Ints *block, Ahead<B> later) {
        Floats total[B][N] = {};
        for (int64_t j = 0; j < keys.groups; j++) {
            Ints sums[B][N][BYTES];
            const int32_t *begin = to_begin_with(g, j);
#pragma GCC unroll 8
            for (int i = 0; i < N; i++)
#pragma GCC unroll 8
                for (int p = 0; p < BYTES; p++)
#pragma GCC unroll 8
                    for (int b = 0; b < B; b++) sums[b][i][p] = all(begin[i * keys.groups * (BYTES + 1) + p]);
            const auto fetch = [&](int64_t t) __attribute__((always_inline)) { later(j * steps.each + t); };
            dot_bytes<B, N>(block + j * steps.each, block_steps(), steps.each, words(j) + g * BYTES, step_words(), fetch,
                            sums);
#pragma GCC unroll 8
            for (int b = 0; b < B; b++) {
                const Scaling by = key_scalings<C>(first[b], j);
#pragma GCC unroll 8
                for (int i = 0; i < N; i++) {
                    float unit;
                    std::memcpy(&unit, begin + i * keys.groups * (BYTES + 1) + BYTES, sizeof unit);
                    total[b][i] += scaled<C>(value_of(sums[b][i]), unit, by, query_sums[(g + i) * keys.groups + j]);
                }
            }
        }
#pragma GCC unroll 8
        for (int b = 0; b < B; b++)
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) store(logits + (g + i) * at.slots + first[b], total[b][i]);
    }
};

}  // namespace

#endif

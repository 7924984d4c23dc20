// The state of a policy that marks rows in a ring of bits: see `Ring` in backends/base.py, and `ring` in
// attention_stats.py.

#pragma once

#include <algorithm>
#include <cstdint>

// The last field of a struct. The addresses of the words follow it.
extern "C" struct Ring {
    int64_t words;  // 0: there is no ring
    int64_t window, least, drop, budget;
    const int64_t *sizes;  // dense, these four numbers per row; null: the numbers above for all
    int64_t bits;          // of a word, a float that holds a whole number exactly; the highest one is its sign
    float *mass;           // receives the mass of this row; dense

    float *word(int64_t i) const { return ((float *const *)(this + 1))[i]; }
};

namespace {

// What the row of a new token changes in the state of one head.
class Marks {
    const Ring &ring;
    const int64_t now;
    int64_t window, due;

   public:
    // `held`: tokens of the head, this one included.
    Marks(const Ring &ring, int64_t row, int64_t now, int64_t held) : ring(ring), now(now) {
        const int64_t *own = ring.sizes ? ring.sizes + 4 * row : &ring.window;
        window = own[0];
        const int64_t least = own[1], drop = std::max<int64_t>(own[2], 1), budget = own[3], over = held - budget;
        const int64_t goes = over > 0 ? std::min((over + drop - 1) / drop * drop, held - least) : 0;
        due = std::max<int64_t>(held - goes + window - budget - 1, 0);
    }

    // `at`: where the head begins in each word. The new token, in slot `own`, starts at 0.
    void apply(const float *mass, const float *low, int64_t slots, int64_t own, int64_t at, float *sum,
               float *next) const {
        for (int64_t i = 0; i < ring.words; i++) ring.word(i)[at + own] = 0.0f;
        next[own] = 0.0f;
        add(mass, slots, sum, next);
        if (now < 0) return;
        const int64_t place = now % (ring.words * ring.bits);
        mark(ring.word(place / ring.bits) + at, low, slots, place % ring.bits);
    }

   private:
    void add(const float *mass, int64_t slots, float *sum, float *next) const {
        const int64_t fresh = now < 0 ? 0 : 1;
        const float all = window > fresh ? 1.0f : 0.0f, some = due > fresh ? 1.0f : 0.0f, mine = due > 0 ? 1.0f : 0.0f;
        for (int64_t s = 0; s < slots; s++) {
            const float past = next[s];
            sum[s] = mass[s] + past * all;
            next[s] = mass[s] * mine + past * some;
        }
    }

    void mark(float *word, const float *low, int64_t slots, int64_t bit) const {
        const int32_t one = (int32_t)((bit + 1 == ring.bits ? ~(uint32_t)0 : (uint32_t)1) << bit);
        for (int64_t s = 0; s < slots; s++)
            word[s] = (float)(((int32_t)word[s] & ~one) | (low[s] != 0.0f ? one : 0));
    }
};

}  // namespace

// Functions on slots: write a token, expire, count, evict. What is empty: see EMPTY in types.py; what is protected,
// expires and goes first: see scores.py. The C interface: see attend.cpp.

#include <cmath>
#include <cstring>

#include "heads.h"
#include "vectors.h"

extern "C" struct Write {
    int64_t rows, kv_heads, slots, dim, value_dim;
    int64_t key_bytes, value_bytes, threads;  // bytes of an element
    char *keys;
    int64_t key_row, key_head, key_slot;
    char *values;
    int64_t value_row, value_head, value_slot;
    int32_t *positions;
    int64_t position_row, position_head;
    const char *new_keys;
    int64_t new_key_row, new_key_head;
    const char *new_values;
    int64_t new_value_row, new_value_head;
    const int64_t *now;
    int64_t now_row;
    int64_t *slot;  // dense
};

// Put each row's token into the first free slot of every head, and report the slot.
extern "C" int64_t kvkeep_write(const Write *w) {
    const auto work = [=](int64_t index, float *) {
        const int64_t row = index / w->kv_heads, head = index % w->kv_heads;
        int32_t *positions = w->positions + row * w->position_row + head * w->position_head;
        int32_t least = positions[0];
        for (int64_t s = 0; s < w->slots; s++) least = positions[s] < least ? positions[s] : least;
        int64_t slot = 0;
        while (positions[slot] != least) slot++;
        positions[slot] = (int32_t)w->now[row * w->now_row];
        w->slot[index] = slot;
        const int64_t key = row * w->key_row + head * w->key_head + slot * w->key_slot;
        const int64_t new_key = row * w->new_key_row + head * w->new_key_head;
        std::memcpy(w->keys + key * w->key_bytes, w->new_keys + new_key * w->key_bytes, w->dim * w->key_bytes);
        const int64_t value = row * w->value_row + head * w->value_head + slot * w->value_slot;
        const int64_t new_value = row * w->new_value_row + head * w->new_value_head;
        std::memcpy(w->values + value * w->value_bytes, w->new_values + new_value * w->value_bytes,
                    w->value_dim * w->value_bytes);
    };
    return for_each(w->rows * w->kv_heads, w->rows * w->kv_heads * w->slots * 4, w->threads, 0, work) ? 0 : -1;
}

extern "C" struct Slots {
    int64_t rows, kv_heads, slots, threads;
    int32_t *positions;
    int64_t position_row, position_head;
    const int64_t *seen;  // tokens that each row has seen
    int64_t seen_row, window;
    const float *scores;
    int64_t score_row, score_head, sinks;
    const int64_t *recents;  // per row; null: `recent` for all
    int64_t recents_row, recent;
    const int64_t *limits;  // per row and head; null: `limit` for all
    int64_t limits_row, limits_head, limit;
};

namespace {

// Call work(positions, row, head, scratch) for every head of every row.
template <class Work>
bool for_each_head(const Slots *s, int64_t floats, const Work &work) {
    const int64_t n = s->rows * s->kv_heads;
    return for_each(n, n * s->slots * 4, s->threads, floats, [=](int64_t index, float *scratch) {
        const int64_t row = index / s->kv_heads, head = index % s->kv_heads;
        work(s->positions + row * s->position_row + head * s->position_head, row, head, scratch);
    });
}

bool is_over(const Slots *s, const int32_t *positions, int64_t row, int64_t head) {
    int32_t held = 0;
    for (int64_t i = 0; i < s->slots; i++) held += positions[i] >= 0;
    return held > (s->limits ? s->limits[row * s->limits_row + head * s->limits_head] : s->limit);
}

}  // namespace

// Empty expired slots.
extern "C" int64_t kvkeep_expire(const Slots *s) {
    return for_each_head(s, 0, [=](int32_t *positions, int64_t row, int64_t, float *) {
        const int32_t last = (int32_t)(s->seen[row * s->seen_row] - s->window);
        for (int64_t i = 0; i < s->slots; i++) positions[i] = positions[i] <= last ? -1 : positions[i];
    }) ? 0 : -1;
}

// The number of heads that hold more than their limit.
extern "C" int64_t kvkeep_count_over(const Slots *s) {
    int64_t over = 0;
    const bool done = for_each_head(s, 0, [=, &over](int32_t *positions, int64_t row, int64_t head, float *) {
        if (is_over(s, positions, row, head)) __atomic_fetch_add(&over, 1, __ATOMIC_RELAXED);
    });
    return done ? over : -1;
}

// Empty the slot that goes first in every head that holds more than its limit.
extern "C" int64_t kvkeep_evict(const Slots *s) {
    return for_each_head(s, up(s->slots, W), [=](int32_t *positions, int64_t row, int64_t head, float *scratch) {
        if (!is_over(s, positions, row, head)) return;
        const float *scores = s->scores + row * s->score_row + head * s->score_head;
        const int64_t newest = s->recents ? s->recents[row * s->recents_row] : s->recent;
        const int32_t recent = (int32_t)(s->seen[row * s->seen_row] - newest), sinks = (int32_t)s->sinks;
        Floats low = all(INFINITY);
        for (int64_t i = 0; i < s->slots; i += W) {
            const Ints position = load<Ints>(positions + i, s->slots - i, -1);
            Floats score = load<Floats>(scores + i, s->slots - i, 0.0f);
            score = select(score != score, all(-INFINITY), score);
            score = select((position >= recent) | (position < sinks), all(INFINITY), score);
            low = select((position >= 0) & (score < low), score, low);
            store(scratch + i, score);
        }
        const float lowest = smallest(low);
        Ints old = all(INT32_MAX);
        for (int64_t i = 0; i < s->slots; i += W) {
            const Ints position = load<Ints>(positions + i, s->slots - i, -1);
            const Ints tied = (position >= 0) & (load<Floats>(scratch + i) == lowest);
            old = select(tied & (position < old), position, old);
        }
        const int32_t oldest = smallest(old);
        for (int64_t i = 0; i < s->slots; i++)
            if (positions[i] == oldest && scratch[i] == lowest) {
                positions[i] = -1;
                return;
            }
    }) ? 0 : -1;
}

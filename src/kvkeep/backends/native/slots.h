// Functions on the slots of one head: write a token, expire, count, evict. What is empty: see EMPTY in types.py; what is
// protected, expires and goes first: see kv/ranking.py.

#pragma once

#include <cmath>
#include <cstring>

#include "codes.h"
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
    Ranges ranges;
    int64_t type;  // of the new token, as in Attend, where the slots hold codes
    Coded key_codes, value_codes;
    Exponents exponents;
    Normals normals;
    const char *back;  // as in Attend, and `half` as well, where the slots hold codes
    int64_t half;
};

extern "C" struct Slots {
    int64_t rows, kv_heads, slots, threads;
    int32_t *positions;
    int64_t position_row, position_head;
    const int64_t *seen;  // tokens that each row has seen
    int64_t seen_row, window;
    const float *scores;
    int64_t score_row, score_head, sinks;
    const int64_t *recents;  // per row and head; null: `recent` for all
    int64_t recents_row, recents_head, recent;
    const int64_t *limits;  // per row and head; null: `limit` for all
    int64_t limits_row, limits_head, limit;
    const int64_t *prompts;  // of each row; tokens before the newest ones of a prompt go last; null: as scored
    int64_t prompts_row;
    Ranges ranges;
};

namespace {

constexpr float LARGEST_FINITE = 0x1.fffffep127f;  // a policy's own infinity never competes with a protected token

inline int32_t *positions_of(const Write &w, int64_t row, int64_t head) {
    return w.positions + row * w.position_row + head * w.position_head + w.ranges.inner(row, head);
}

// The numbers of lanes.
template <int... I>
inline Ints numbered(std::integer_sequence<int, I...>) {
    return Ints{I...};
}

// Where the first of n numbers is that is x; n: nowhere.
inline int64_t find(const int32_t *numbers, int64_t n, int32_t x) {
    constexpr int64_t SEVERAL = 8 * W;
    int64_t i = 0;
    for (; i + SEVERAL <= n; i += SEVERAL) {
        Ints found = {};
        for (int64_t k = 0; k < SEVERAL; k += W) found |= load<Ints>(numbers + i + k) == x;
        if (any(found)) break;
    }
    while (i < n && numbers[i] != x) i++;
    return i;
}

// Give the first free slot of a head the position of the row's token. Returns the slot.
inline int64_t take_slot(const Write &w, int64_t row, int64_t head) {
    int32_t *positions = positions_of(w, row, head);
    const int64_t slots = w.ranges.places(row, head, w.slots);
    int32_t least = positions[0];
    for (int64_t s = 0; s < slots; s++) least = positions[s] < least ? positions[s] : least;
    const int64_t slot = find(positions, slots, least);
    positions[slot] = (int32_t)w.now[row * w.now_row];
    return slot;
}

// Where a head's slot lies among keys and values.
inline int64_t entry_of(const Write &w, int64_t row, int64_t head, int64_t slot) {
    return slot + w.ranges.start(row, head);
}

// Put a row's token into the first free slot of a head. Returns the slot.
inline int64_t write_head(const Write &w, int64_t row, int64_t head) {
    const int64_t slot = take_slot(w, row, head), entry = entry_of(w, row, head, slot);
    const int64_t key = row * w.key_row + head * w.key_head + entry * w.key_slot;
    const int64_t new_key = row * w.new_key_row + head * w.new_key_head;
    std::memcpy(w.keys + key * w.key_bytes, w.new_keys + new_key * w.key_bytes, w.dim * w.key_bytes);
    const int64_t value = row * w.value_row + head * w.value_head + entry * w.value_slot;
    const int64_t new_value = row * w.new_value_row + head * w.new_value_head;
    std::memcpy(w.values + value * w.value_bytes, w.new_values + new_value * w.value_bytes, w.value_dim * w.value_bytes);
    return slot;
}

inline int32_t *positions_of(const Slots &s, int64_t row, int64_t head) {
    return s.positions + row * s.position_row + head * s.position_head + s.ranges.inner(row, head);
}

inline int64_t places_of(const Slots &s, int64_t row, int64_t head) { return s.ranges.places(row, head, s.slots); }

// Empty expired slots.
inline void expire_head(const Slots &s, int64_t row, int64_t head) {
    int32_t *positions = positions_of(s, row, head);
    const int64_t slots = places_of(s, row, head);
    const int32_t last = (int32_t)(s.seen[row * s.seen_row] - s.window);
    for (int64_t i = 0; i < slots; i++) positions[i] = positions[i] <= last ? -1 : positions[i];
}

// The number of occupied slots.
inline int32_t held_by(const Slots &s, int64_t row, int64_t head) {
    const int32_t *positions = positions_of(s, row, head);
    const int64_t slots = places_of(s, row, head);
    int32_t held = 0;
    for (int64_t i = 0; i < slots; i++) held += positions[i] >= 0;
    return held;
}

inline bool is_over(const Slots &s, int64_t row, int64_t head) {
    return held_by(s, row, head) > (s.limits ? s.limits[row * s.limits_row + head * s.limits_head] : s.limit);
}

// Empty the slot that goes first, if the head holds more than its limit. Without scores the position is the score.
// Returns the slot, or -1.
inline int64_t evict_head(const Slots &s, int64_t row, int64_t head) {
    if (!is_over(s, row, head)) return -1;
    int32_t *positions = positions_of(s, row, head);
    const int64_t slots = places_of(s, row, head), inner = s.ranges.inner(row, head);
    const float *scores = s.scores ? s.scores + row * s.score_row + head * s.score_head + inner : nullptr;
    const int64_t newest = s.recents ? s.recents[row * s.recents_row + head * s.recents_head] : s.recent;
    const int32_t recent = (int32_t)(s.seen[row * s.seen_row] - newest), sinks = (int32_t)s.sinks;
    const int32_t chosen = s.prompts ? (int32_t)(s.prompts[row * s.prompts_row] - newest) : INT32_MIN;
    Floats low = all(INFINITY);
    Ints old = all(INT32_MAX), where = all(-1);  // the oldest of the lowest, lane by lane
    Ints slot = numbered(std::make_integer_sequence<int, W>());
    for (int64_t i = 0; i < slots; i += W) {
        const Ints position = load<Ints>(positions + i, slots - i, -1);
        Floats score = scores ? load<Floats>(scores + i, slots - i, 0.0f) : __builtin_convertvector(position, Floats);
        score = select(score != score, all(-INFINITY), select(score > LARGEST_FINITE, all(LARGEST_FINITE), score));
        score = select(position < chosen, all(LARGEST_FINITE), score);
        score = select((position >= recent) | (position < sinks), all(INFINITY), score);
        const Ints first = (position >= 0) & ((score < low) | ((score == low) & (position < old)));
        low = select(first, score, low);
        old = select(first, position, old);
        where = select(first, slot, where);
        slot += W;
    }
    const Ints lowest = low == smallest(low), oldest = lowest & (old == smallest(select(lowest, old, all(INT32_MAX))));
    const int32_t found = smallest(select(oldest & (where >= 0), where, all(INT32_MAX)));
    if (found == INT32_MAX) return -1;
    positions[found] = -1;
    return found;
}

}  // namespace

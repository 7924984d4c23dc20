// The functions that Python calls. Each takes one struct of 8-byte fields, which ops.py or one of its neighbours packs
// in the same order, and returns -1 if there was no memory; then nothing has been done.

#include "attend.h"
#include "prompt.h"
#include "ring.h"
#include "small.h"
#include "slots.h"

// A whole decode step: write the token into a free slot, attend, add the mass to the policy's sums, expire and evict.
extern "C" struct Step {
    Attend attend;  // keys, values and positions are written, too
    const char *new_keys;
    int64_t new_key_row, new_key_head;
    const char *new_values;
    int64_t new_value_row, new_value_head;
    float *sums[2];  // null where there are fewer
    int64_t sum_row, sum_head;
    int64_t by_sum;       // whether the first sum is the score; otherwise the position is
    const int64_t *seen;  // tokens that each row has seen, this one included
    int64_t seen_row, sinks;
    const int64_t *recents;  // as in Slots
    int64_t recents_row, recents_head, recent;
    const int64_t *limits;
    int64_t limits_row, limits_head, limit;
    double keep;  // factor on a sum before the mass is added
    float *lost;  // mass of the victim, and of all slots: both are added to; null: not wanted
    int64_t lost_row, lost_head;
    Ring ring;  // without words: none
};

namespace {

template <class X>
int64_t attend_as(const Attend &a) {
    const int64_t bytes = a.rows * a.kv_heads * a.slots * (a.dim + a.value_dim) * (int64_t)sizeof(typename X::T);
    const auto work = [&](int64_t i, float *scratch) {
        float *mass = a.mass ? a.mass + i * a.slots : nullptr, *extra = a.extra ? a.extra + i * a.slots : nullptr;
        Head<X>(a, i, scratch, mass, extra).run();
    };
    return for_each(a.rows * a.kv_heads, bytes, a.threads, Layout(a).size, work) ? 0 : -1;
}

// Fade a sum and add to it; a new token, in slot `own`, starts at 0.
inline void add(float *sum, const float *mass, int64_t slots, int64_t own, float keep) {
    sum[own] = 0.0f;
    for (int64_t s = 0; s < slots; s++) sum[s] = sum[s] * keep + mass[s];
}

// The mass of the slots that hold a token.
inline float mass_held(const int32_t *positions, const float *mass, int64_t slots) {
    Floats total = all(0.0f);
    for (int64_t i = 0; i < slots; i += W) {
        const Ints position = load<Ints>(positions + i, slots - i, -1);
        total += select(position >= 0, load<Floats>(mass + i, slots - i, 0.0f), all(0.0f));
    }
    return sum(total);
}

template <class X>
Write write_of(const Step &s) {
    const Attend &a = s.attend;
    constexpr int64_t bytes = sizeof(typename X::T);
    return {a.rows, a.kv_heads, a.slots, a.dim, a.value_dim, bytes, bytes, a.threads,
            const_cast<char *>(a.keys), a.key_row, a.key_head, a.key_slot,
            const_cast<char *>(a.values), a.value_row, a.value_head, a.value_slot,
            const_cast<int32_t *>(a.positions), a.position_row, a.position_head,
            s.new_keys, s.new_key_row, s.new_key_head, s.new_values, s.new_value_row, s.new_value_head,
            a.now, a.now_row, nullptr, a.starts};
}

Slots slots_of(const Step &s) {
    const Attend &a = s.attend;
    return {a.rows, a.kv_heads, a.slots, a.threads,
            const_cast<int32_t *>(a.positions), a.position_row, a.position_head,
            s.seen, s.seen_row, a.window, s.by_sum ? s.sums[0] : nullptr, s.sum_row, s.sum_head, s.sinks,
            s.recents, s.recents_row, s.recents_head, s.recent, s.limits, s.limits_row, s.limits_head, s.limit};
}

// Remove the rotation from the key that has been written into slot `own`.
template <class X>
void unrotate(const Step &s, int64_t row, int64_t head, int64_t own) {
    typedef typename X::T T;
    const Attend &a = s.attend;
    const T *key = (const T *)s.new_keys + row * s.new_key_row + head * s.new_key_head;
    const int64_t entry = own + (a.starts ? a.starts[row * a.kv_heads + head] : 0);
    T *to = (T *)const_cast<char *>(a.keys) + row * a.key_row + head * a.key_head + entry * a.key_slot;
    unturn_key<X>(key, (const T *)a.back + row * 2 * a.half, a.half, to);
}

template <class X>
int64_t step_as(const Step &s) {
    const Attend &a = s.attend;
    const Write write = write_of<X>(s);
    const Slots held = slots_of(s);
    const int64_t bytes = a.rows * a.kv_heads * a.slots * (a.dim + a.value_dim) * (int64_t)sizeof(typename X::T);
    const int64_t attention = up(Layout(a).size, W), slots = up(a.slots, W);
    const auto work = [&](int64_t i, float *scratch) {
        const int64_t row = i / a.kv_heads, head = i % a.kv_heads;
        const int64_t own = write_head(write, row, head);
        if (a.back) unrotate<X>(s, row, head, own);
        float *mass = s.ring.words ? s.ring.mass + i * a.slots : scratch + attention;
        float *spare = scratch + attention + slots;
        Head<X>(a, i, scratch, mass, spare).run();
        float *lost = s.lost ? s.lost + row * s.lost_row + head * s.lost_head : nullptr;
        if (s.ring.words) {
            const int64_t at = row * s.sum_row + head * s.sum_head;
            const Marks marks(s.ring, row, a.now[row * a.now_row], held_by(held, row, head));
            marks.apply(mass, spare, a.slots, own, at, s.sums[0] + at, s.sums[1] + at);
            if (lost) lost[1] += mass_held(positions_of(held, row, head), mass, a.slots);
            return;
        }
        const float keep = a.now[row * a.now_row] < 0 ? 1.0f : (float)s.keep;
        for (float *sum : s.sums)
            if (sum) add(sum + row * s.sum_row + head * s.sum_head, mass, a.slots, own, keep);
        if (a.window) expire_head(held, row, head);
        if (lost) lost[1] += mass_held(positions_of(held, row, head), mass, a.slots);
        const int64_t victim = evict_head(held, row, head, spare);
        if (lost && victim >= 0) lost[0] += mass[victim];
    };
    return for_each(a.rows * a.kv_heads, bytes, a.threads, attention + 2 * slots, work) ? 0 : -1;
}

// Call work(row, head, scratch) for every head of every row.
template <class Work>
bool for_each_head(const Slots &s, int64_t floats, const Work &work) {
    const int64_t n = s.rows * s.kv_heads;
    return for_each(n, n * s.slots * 4, s.threads, floats,
                    [&](int64_t i, float *scratch) { work(i / s.kv_heads, i % s.kv_heads, scratch); });
}

}  // namespace

extern "C" int64_t kvkeep_attend(const Attend *a) {
    switch (a->type) {
        case 0: return attend_as<Float32>(*a);
        case 1: return attend_as<BFloat16>(*a);
        default: return attend_as<Float16>(*a);
    }
}

extern "C" int64_t kvkeep_prefill(const Prefill *a) {
    switch (a->type) {
        case 0: return prefill_as<Float32>(*a);
        case 1: return prefill_as<BFloat16>(*a);
        default: return prefill_as<Float16>(*a);
    }
}

extern "C" int64_t kvkeep_step(const Step *s) {
    switch (s->attend.type) {
        case 0: return step_as<Float32>(*s);
        case 1: return step_as<BFloat16>(*s);
        default: return step_as<Float16>(*s);
    }
}

extern "C" int64_t kvkeep_products(const Products *p) {
    switch (p->type) {
        case 0: return products_as<Float32>(*p);
        case 1: return products_as<BFloat16>(*p);
        default: return products_as<Float16>(*p);
    }
}

extern "C" int64_t kvkeep_gated(const Gated *g) {
    switch (g->type) {
        case 0: return gated_as<Float32>(*g);
        case 1: return gated_as<BFloat16>(*g);
        default: return gated_as<Float16>(*g);
    }
}

extern "C" int64_t kvkeep_norm(const Norm *n) {
    switch (n->type) {
        case 0: return norm_as<Float32>(*n);
        case 1: return norm_as<BFloat16>(*n);
        default: return norm_as<Float16>(*n);
    }
}

extern "C" int64_t kvkeep_write(const Write *w) {
    const int64_t n = w->rows * w->kv_heads;
    return for_each(n, n * w->slots * 4, w->threads, 0, [&](int64_t i, float *) {
        w->slot[i] = write_head(*w, i / w->kv_heads, i % w->kv_heads);
    }) ? 0 : -1;
}

extern "C" int64_t kvkeep_expire(const Slots *s) {
    return for_each_head(*s, 0, [=](int64_t row, int64_t head, float *) { expire_head(*s, row, head); }) ? 0 : -1;
}

// The number of heads that hold more than their limit.
extern "C" int64_t kvkeep_count_over(const Slots *s) {
    int64_t over = 0;
    const bool done = for_each_head(*s, 0, [=, &over](int64_t row, int64_t head, float *) {
        if (is_over(*s, row, head)) __atomic_fetch_add(&over, 1, __ATOMIC_RELAXED);
    });
    return done ? over : -1;
}

extern "C" int64_t kvkeep_evict(const Slots *s) {
    const auto work = [=](int64_t row, int64_t head, float *scratch) { evict_head(*s, row, head, scratch); };
    return for_each_head(*s, up(s->slots, W), work) ? 0 : -1;
}

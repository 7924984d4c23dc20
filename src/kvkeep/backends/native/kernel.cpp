// The functions that Python calls. Each takes one struct of 8-byte fields, which ops.py or one of its neighbours packs
// in the same order, and returns -1 if there was no memory; then nothing has been done.

#include <numeric>

#include "attend.h"
#include "coded.h"
#include "layer.h"
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
    const int64_t *prompts;
    int64_t prompts_row;
    double keep;  // factor on a sum before the mass is added
    float *lost;  // mass of the victim, and of all slots: both are added to; null: not wanted
    int64_t lost_row, lost_head;
    Ring ring;  // without words: none
};

// A decode step of a whole layer: what is before its attention, the step, and what is behind it. All that stays from
// step to step; the rest is filled in.
extern "C" struct LayerStep {
    Before before;
    Step step;
    Behind behind;
    int64_t kind;  // which of the angles
};

// The cosines and sines of the rows' positions.
extern "C" struct Angles {
    const char *cosines, *sines;
    int64_t cosine_row, sine_row;
};

// A decode step of all layers, one after the other.
extern "C" struct ModelStep {
    int64_t layers, threads;
    const LayerStep *kept;
    const Angles *angles;  // of each kind of layer
    char *x;               // rows x width: what goes into the first layer, and then what comes out of the last one
};

namespace {

// Call with the element type of this number.
template <class Call>
int64_t by_type(int64_t type, const Call &call) {
    return type == 0 ? call(Float32()) : type == 1 ? call(BFloat16()) : call(Float16());
}

// Bytes of keys and values with so many for each number. Codes take as long as numbers of two bytes.
int64_t work_of(const Attend &a, int64_t each) {
    return a.rows * a.kv_heads * a.slots * (a.dim + a.value_dim) * each;
}

template <class AnyHead>
int64_t attend_as(const Attend &a, int64_t each) {
    const auto work = [&](int64_t i, float *scratch) {
        float *mass = a.mass ? a.mass + i * a.slots : nullptr, *extra = a.extra ? a.extra + i * a.slots : nullptr;
        AnyHead(a, i, scratch, mass, extra).run();
    };
    return for_each(a.rows * a.kv_heads, work_of(a, each), a.threads, AnyHead::layout(a).size, work) ? 0 : -1;
}

// Fade a sum and add to it; a new token, in slot `own`, starts at 0. No mass: other tokens keep their sum.
inline void add(float *sum, const float *mass, int64_t slots, int64_t own, float keep) {
    sum[own] = 0.0f;
    if (!mass) return;
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

Write write_of(const Step &s) {
    const Attend &a = s.attend;
    const int64_t bytes = a.key_codes.bits ? 1 : bytes_of(a.type);
    return {a.rows, a.kv_heads, a.slots, a.dim, a.value_dim, bytes, bytes, a.threads,
            const_cast<char *>(a.keys), a.key_row, a.key_head, a.key_slot,
            const_cast<char *>(a.values), a.value_row, a.value_head, a.value_slot,
            const_cast<int32_t *>(a.positions), a.position_row, a.position_head,
            s.new_keys, s.new_key_row, s.new_key_head, s.new_values, s.new_value_row, s.new_value_head,
            a.now, a.now_row, nullptr, a.ranges, a.type, a.key_codes, a.value_codes, a.exponents,
            a.normals, a.back, a.half};
}

Slots slots_of(const Step &s) {
    const Attend &a = s.attend;
    return {a.rows, a.kv_heads, a.slots, a.threads,
            const_cast<int32_t *>(a.positions), a.position_row, a.position_head,
            s.seen, s.seen_row, a.window, s.by_sum ? s.sums[0] : nullptr, s.sum_row, s.sum_head, s.sinks,
            s.recents, s.recents_row, s.recents_head, s.recent, s.limits, s.limits_row, s.limits_head, s.limit,
            s.prompts, s.prompts_row, a.ranges};
}

// Remove the rotation from the key that has been written into slot `own`.
template <class X>
void unrotate(const Step &s, int64_t row, int64_t head, int64_t own) {
    typedef typename X::T T;
    const Attend &a = s.attend;
    const T *key = (const T *)s.new_keys + row * s.new_key_row + head * s.new_key_head;
    const int64_t entry = own + a.ranges.start(row, head);
    T *to = (T *)const_cast<char *>(a.keys) + row * a.key_row + head * a.key_head + entry * a.key_slot;
    unturn_key<X>(key, (const T *)a.back + row * 2 * a.half, a.half, to);
}

// A step. put(write, row, head, scratch), with so many scratch floats, writes a token and returns its slot.
template <class AnyHead, class Put>
int64_t step_as(const Step &s, int64_t each, int64_t floats, const Put &put) {
    const Attend &a = s.attend;
    const Write write = write_of(s);
    const Slots held = slots_of(s);
    const int64_t attention = up(std::max(AnyHead::layout(a).size, floats), W), slots = up(a.slots, W);
    const auto work = [&](int64_t i, float *scratch) {
        const int64_t row = i / a.kv_heads, head = i % a.kv_heads;
        const int64_t places = a.ranges.places(row, head, a.slots), own = put(write, row, head, scratch);
        float *mass = s.ring.words ? s.ring.mass + i * a.slots : scratch + attention;
        float *spare = scratch + attention + slots;
        AnyHead(a, i, scratch, mass, spare).run();
        float *lost = s.lost ? s.lost + row * s.lost_row + head * s.lost_head : nullptr;
        if (s.ring.words) {
            const int64_t at = row * s.sum_row + head * s.sum_head;
            const Marks marks(s.ring, row, a.now[row * a.now_row], held_by(held, row, head));
            marks.apply(mass, spare, a.slots, own, at, s.sums[0] + at, s.sums[1] + at);
            if (lost) lost[1] += mass_held(positions_of(held, row, head), mass, a.slots);
            return;
        }
        const float keep = a.now[row * a.now_row] < 0 ? 1.0f : (float)s.keep;
        const int64_t at = row * s.sum_row + head * s.sum_head + a.ranges.inner(row, head);
        for (float *sum : s.sums)
            if (sum) add(sum + at, a.kind == NOTHING ? nullptr : mass, places, own, keep);
        if (a.window) expire_head(held, row, head);
        if (lost) lost[1] += mass_held(positions_of(held, row, head), mass, places);
        const int64_t victim = evict_head(held, row, head);
        if (lost && victim >= 0) lost[0] += mass[victim];
    };
    return for_each(a.rows * a.kv_heads, work_of(a, each), a.threads, attention + 2 * slots, work) ? 0 : -1;
}

template <class X>
int64_t plain_step(const Step &s) {
    return step_as<Head<X>>(s, sizeof(typename X::T), 0, [&](const Write &write, int64_t row, int64_t head, float *) {
        const int64_t own = write_head(write, row, head);
        if (s.attend.back) unrotate<X>(s, row, head, own);
        return own;
    });
}

int64_t coded_step(const Step &s) {
    return step_as<CodedHead>(s, 2, coding_floats(s.attend.dim, s.attend.value_dim), code_head);
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
    if (a->key_codes.bits) return attend_as<CodedHead>(*a, 2);
    return by_type(a->type, [=](auto x) { return attend_as<Head<decltype(x)>>(*a, sizeof(typename decltype(x)::T)); });
}

extern "C" int64_t kvkeep_prefill(const Prefill *a) {
    return by_type(a->type, [=](auto x) { return prefill_as<decltype(x)>(*a); });
}

extern "C" int64_t kvkeep_step(const Step *s) {
    if (s->attend.key_codes.bits) return coded_step(*s);
    return by_type(s->attend.type, [=](auto x) { return plain_step<decltype(x)>(*s); });
}

// Whether there are products in tiles of bfloat16 numbers.
extern "C" int64_t kvkeep_has_squares(const void *) { return has_squares(); }

extern "C" int64_t kvkeep_products(const Products *p) {
    return by_type(p->type, [=](auto x) { return products_as<decltype(x)>(*p); });
}

extern "C" int64_t kvkeep_unpack(const Unpack *u) { return unpack(*u); }

extern "C" int64_t kvkeep_gated(const Gated *g) {
    return by_type(g->type, [=](auto x) { return gated_as<decltype(x)>(*g); });
}

extern "C" int64_t kvkeep_norm(const Norm *n) {
    return by_type(n->type, [=](auto x) { return norm_as<decltype(x)>(*n); });
}

extern "C" int64_t kvkeep_before(const Before *b) {
    return by_type(b->type, [=](auto x) { return before_as<decltype(x)>(*b); });
}

extern "C" int64_t kvkeep_behind(const Behind *b) {
    return by_type(b->type, [=](auto x) { return behind_as<decltype(x)>(*b); });
}

namespace {

constexpr int64_t LOOPS = 16;  // of a layer, at most

// What the layers need beside their tokens: the room of the layer that needs most.
struct Room {
    static constexpr int PARTS = 8;
    int64_t sizes[PARTS] = {};

    void add(const LayerStep &layer) {
        const Before &b = layer.before;
        const auto floats = [&](int64_t numbers) { return up(b.rows * numbers * bytes_of(b.type), 64) / 4; };
        const int64_t mine[PARTS] = {
            floats(b.all[0].outputs), floats(b.all[1].outputs), floats(b.all[2].outputs),
            floats(layer.behind.attention_width), floats(b.width), floats(2 * b.width + layer.behind.gate.outputs),
            up(2 * b.rows, W), floats(2 * layer.step.attend.half)};
        for (int i = 0; i < PARTS; i++) sizes[i] = std::max(sizes[i], mine[i]);
    }
};

// Write the cosines of each row, then its sines, as Attend takes them to rotate back. The model's come twice, for either
// half of a head.
char *rotation_back(const Attend &a, const Angles &angles, char *to) {
    const int64_t bytes = bytes_of(a.type), half = a.half * bytes;
    for (int64_t row = 0; row < a.rows; row++) {
        std::memcpy(to + 2 * row * half, angles.cosines + row * angles.cosine_row * bytes, half);
        std::memcpy(to + (2 * row + 1) * half, angles.sines + row * angles.sine_row * bytes, half);
    }
    return to;
}

// The tokens' positions are the numbers of tokens that the rows have seen, which are counted here. Returns -1 if nothing
// has changed, and 1 if the slots hold the tokens and there was no memory for what is behind attention.
int64_t layer_step(const LayerStep &kept, const Angles &angles, int64_t threads, char *x, float *const *parts) {
    Before before = kept.before;
    Step step = kept.step;
    Behind behind = kept.behind;
    const Weights *all = before.all;
    const int64_t rows = before.rows;
    before.x = behind.x = x;
    before.cosines = angles.cosines, before.cosine_row = angles.cosine_row;
    before.sines = angles.sines, before.sine_row = angles.sine_row;
    before.threads = behind.threads = step.attend.threads = threads;
    for (int i = 0; i < 3; i++) before.all[i].out = (char *)parts[i];
    before.scratch = (char *)parts[4];
    if (kvkeep_before(&before)) return -1;
    int64_t *const seen = (int64_t *)step.seen, *const positions = (int64_t *)parts[6];
    for (int64_t row = 0; row < rows; row++) positions[row] = seen[row * step.seen_row]++;
    Attend &a = step.attend;
    a.query = (char *)parts[0], a.query_row = all[0].outputs, a.query_head = before.dim;
    step.new_keys = (char *)parts[1], step.new_key_row = all[1].outputs, step.new_key_head = before.dim;
    step.new_values = (char *)parts[2], step.new_value_row = all[2].outputs, step.new_value_head = before.dim;
    a.now = positions, a.now_row = 1, a.out = (char *)parts[3];
    if (a.back) a.back = rotation_back(a, angles, (char *)parts[7]);
    if (kvkeep_step(&step)) {
        for (int64_t row = 0; row < rows; row++) seen[row * step.seen_row]--;
        return -1;
    }
    behind.attention = (char *)parts[3], behind.scratch = (char *)parts[5], behind.down.out = x;
    return kvkeep_behind(&behind) ? 1 : 0;
}

}  // namespace

// Returns -1 if nothing has changed, and 1 if some slots hold the tokens and there was no memory for the rest.
extern "C" int64_t kvkeep_model_step(const ModelStep *now) {
    Room room;
    for (int64_t i = 0; i < now->layers; i++) room.add(now->kept[i]);
    const Scratch memory(std::accumulate(room.sizes, room.sizes + Room::PARTS, (int64_t)0));
    if (!memory.get()) return -1;
    float *parts[Room::PARTS] = {memory.get()};
    for (int i = 1; i < Room::PARTS; i++) parts[i] = parts[i - 1] + room.sizes[i - 1];
    int64_t result = 0;
    as_team(LOOPS * now->layers, now->threads, [&] {
        for (int64_t i = 0; i < now->layers && !result; i++) {
            const LayerStep &kept = now->kept[i];
            const int64_t failed = layer_step(kept, now->angles[kept.kind], now->threads, now->x, parts);
            if (failed) result = i || failed > 0 ? 1 : -1;
        }
    });
    return result;
}

extern "C" int64_t kvkeep_write(const Write *w) {
    const int64_t n = w->rows * w->kv_heads, floats = w->key_codes.bits ? coding_floats(w->dim, w->value_dim) : 0;
    return for_each(n, n * w->slots * 4, w->threads, floats, [=](int64_t i, float *scratch) {
        const int64_t row = i / w->kv_heads, head = i % w->kv_heads;
        w->slot[i] = floats ? code_head(*w, row, head, scratch) : write_head(*w, row, head);
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
    return for_each_head(*s, 0, [=](int64_t row, int64_t head, float *) { evict_head(*s, row, head); }) ? 0 : -1;
}

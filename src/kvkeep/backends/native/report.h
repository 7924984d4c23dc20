// From logits to probabilities, and from these to a policy's statistic, for the query heads that share a KV head.
//
// The interface is plain C: one struct of 8-byte fields, which ops.py and its neighbours pack in the same order; a
// result of -1 means that there was no memory. Strides count elements, and the last axis of every tensor is dense. Axis
// letters in comments are those of types.py.

#pragma once

#include "codes.h"
#include "heads.h"
#include "inner.h"
#include "vectors.h"

enum Kind { NOTHING, MASS, MASS_AND_LAST, MASS_AND_LOW };

extern "C" struct Attend {
    int64_t rows, kv_heads, group, slots, dim, value_dim, threads;
    int64_t type;  // of query, output and, unless they are coded, keys and values: 0 float32, 1 bfloat16, 2 float16
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
    Ranges ranges;                 // no head has more than `slots`
    Coded key_codes, value_codes;  // both are coded, or neither
    Exponents exponents;           // of coded keys
    Normals normals;
};

namespace {

// The scratch memory of one head: offsets in floats.
struct Layout {
    int64_t slots, width, value_width, query, logits, tempered, out, shown, scale, own, size;

    // `width` and `value_width`: floats of a query and of an output; `own`: floats for the kind of head.
    Layout(const Attend &a, int64_t width, int64_t value_width, int64_t own_floats)
        : slots(up(a.slots, W)), width(width), value_width(value_width) {
        query = 0;
        logits = query + a.group * width;
        tempered = logits + a.group * slots;
        out = tempered + (a.has_gain ? a.group * slots : 0);
        shown = out + a.group * value_width;
        scale = shown + slots;
        own = up(scale + 2 * a.group, W);
        size = own + own_floats;
    }
};

// One row's query heads that share a KV head, whatever the type of its keys and values.
class Reporter {
   protected:
    const Attend &a;
    const Layout at;
    const int64_t row, head, now, start, slots;
    const int32_t *positions;
    float *query, *logits, *tempered, *out, *scale, *const mass, *const extra;
    int32_t *shown;
    float gain;
    bool tempers;         // whether the reported probabilities differ from those that attention uses
    int64_t visible = 0;  // slots whose token is not after the query, sliding windows aside

    // `mass` and `extra`: where the report of this head goes; null if there is none.
    Reporter(const Attend &a, Layout layout, int64_t index, float *scratch, float *mass, float *extra)
        : a(a), at(layout), row(index / a.kv_heads), head(index % a.kv_heads), now(a.now[row * a.now_row]),
          start(a.ranges.start(row, head)), slots(a.ranges.size(row, head, a.slots)),
          positions(a.positions + row * a.position_row + head * a.position_head + a.ranges.inner(row, head)),
          query(scratch + at.query), logits(scratch + at.logits), tempered(scratch + at.tempered), out(scratch + at.out),
          scale(scratch + at.scale), mass(mass), extra(extra), shown((int32_t *)(scratch + at.shown)),
          gain(a.gains ? a.gains[row] : (float)a.gain), tempers(a.has_gain && (gain != 1.0f || a.sinks)) {}

    // Call block(s) for every block of slots in which the query sees a slot.
    template <class Block>
    void each_block(const Block &block) {
        const int64_t before = a.window && now >= a.window ? now - a.window : -1;
        Ints count = {};
        for (int64_t s = 0; s < slots; s += W) {
            const Ints position = positions_at(s), past = (position >= 0) & (position <= (int32_t)now);
            const Ints show = past & (position > (int32_t)before);
            count -= past;
            store(shown + s, show);
            if (any(show)) block(s);
        }
        visible = sum(count);
    }

    // Turn logits into e^(logit - largest), 0 where hidden; times `scale` they are probabilities.
    void soften() {
        if (a.softcap != 0.0)
            for (int64_t g = 0; g < a.group; g++)
                for (float *x = logits + g * at.slots, *end = x + slots; x < end; x += W)
                    store(x, tanh(load<Floats>(x) / (float)a.softcap) * (float)a.softcap);
        by_group(a.group, [&](int64_t g, auto heads) {
            const float *x = logits + g * at.slots;
            Floats most[heads.value];
            for (int i = 0; i < heads.value; i++) most[i] = all(-INFINITY);
            for (int64_t s = 0; s < slots; s += W) {
                const Ints show = load<Ints>(shown + s);
                for (int i = 0; i < heads.value; i++)
                    most[i] = larger(select(show, load<Floats>(x + i * at.slots + s), all(-INFINITY)), most[i]);
            }
            for (int i = 0; i < heads.value; i++) soften(g + i, largest(most[i]));
        });
    }

    // The same for one query head, whose largest logit is known.
    void soften(int64_t g, float peak) {
        float *x = logits + g * at.slots;
        const float sink = a.sinks ? a.sinks[head * a.group + g] : -INFINITY, top = sink > peak ? sink : peak;
        const float whole_tempered = tempers ? temper(x, peak, tempered + g * at.slots) : 0.0f;
        const float whole = exponentials(x, top) + (sink == -INFINITY ? 0.0f : std::exp(sink - top));
        scale[g] = whole == 0.0f ? 0.0f : 1.0f / whole;  // 0: the query sees nothing
        scale[a.group + g] = whole_tempered == 0.0f ? 0.0f : 1.0f / whole_tempered;
    }

    // Replace logits by e^(logit - top), 0 where hidden. Returns the sum.
    float exponentials(float *x, float top) const {
        const int32_t *const shown = this->shown;  // members would be read again after each store
        const int64_t n = slots;
        Floats total = {};
#pragma GCC unroll 2
        for (int64_t s = 0; s < n; s += W) {
            const Floats e = select(load<Ints>(shown + s), exp_of_small(load<Floats>(x + s) - top), Floats{});
            total += e;
            store(x + s, e);
        }
        return sum(total);
    }

    // The exponentials of logits under the gain. Returns the sum.
    float temper(const float *x, float peak, float *to) const {
        const Floats none = all(std::pow(0.0f, gain));  // of a probability of 0
        Floats total = {};
        for (int64_t s = 0; s < slots; s += W) {
            const Floats outside = select(past_at(s), none, Floats{});
            const Floats power = select(load<Ints>(shown + s), exp((load<Floats>(x + s) - peak) * gain), outside);
            total += power;
            store(to + s, power);
        }
        return sum(total);
    }

    Ints positions_at(int64_t s) const { return load<Ints>(positions + s, slots - s, -1); }

    Ints past_at(int64_t s) const {
        const Ints position = positions_at(s);
        return (position >= 0) & (position <= (int32_t)now);
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
        const float each = 1.0f / (float)a.group;
        for (int64_t s = 0; s < slots; s += W) {
            Floats total = {};
            for (int64_t g = 0; g < a.group; g++) total += load<Floats>(p + g * at.slots + s) * factor[g];
            store(mass + s, total * each, slots - s);
        }
    }
};

}  // namespace

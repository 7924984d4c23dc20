// Attention of one token per row over slots that hold codes, and a token written as codes.

#pragma once

#include "ranks.h"
#include "slots.h"
#include "whole_codes.h"

namespace {

#ifdef KVKEEP_WHOLE
typedef Whole Multiplier;
#else
typedef Widened Multiplier;
#endif

// The attention of the query heads of one row that share a KV head, as Head's in attend.h. Types are told apart when it
// runs, as only queries and outputs depend on them.
class CodedHead : Multiplier {
    const Halves halves;
    float *vector;        // room for a query, a key or an output, in its own order
    float *own, *turned;  // under slot positions: angles, and the keys of a block
    Ranks ranks;

    static int64_t room(const Attend &a) { return up(std::max(a.dim, a.value_dim), 2 * W); }

   public:
    static Layout layout(const Attend &a) {
        const int64_t value_width = Multiplier::output_floats(a), own = up(Multiplier::own_floats(a), W) + room(a);
        if (!a.angles) return Layout(a, Multiplier::query_floats(a), value_width, own);
        const int64_t width = Halves(a.dim, a.half).floats();
        return Layout(a, width, value_width, own + room(a) + W * width + Ranks::FLOATS * up(a.slots, W));
    }

    CodedHead(const Attend &a, int64_t index, float *scratch, float *mass, float *extra)
        : Multiplier(a, layout(a), index, scratch, mass, extra), halves(a.dim, a.half),
          vector(scratch + at.own + up(Multiplier::own_floats(a), W)), own(vector + room(a)), turned(own + room(a)),
          ranks(a.slots, turned + W * at.width) {}

    void run() {
        std::memset(out, 0, a.group * at.value_width * sizeof *out);
        if (now >= 0) {
            if (a.angles) {
                ranks.read(positions, slots);
                read_unrotated_query();
                by_bits(keys.bits, [&](auto code) { score_turned<decltype(code)>(); });
            } else {
                read_query();
                by_bits(keys.bits, [&](auto code) { score<decltype(code)>(); });
            }
            soften();
            by_bits(values.bits, [&](auto code) { weigh_values<decltype(code)>(); });
        }
        write_out();
        if (a.kind != NOTHING) report(now < 0 ? 0.0f : weight());
    }

   private:
    // Do with the queries what makes their products with coded keys those with the keys: KeyTransform in slot_codec.py.
    void read_query() {
        const int64_t first = row * a.query_row + head * a.group * a.query_head;
        for (int64_t g = 0; g < a.group; g++) {
            widen_all(a.type, a.query + (first + g * a.query_head) * bytes_of(a.type), a.dim, vector);
            multiply_by_powers<1>(vector, a.exponents.of(row, head), a.dim);
            hadamard(vector, a.dim);
            reflect(vector, a.normals, row, head, a.dim);
            for (int64_t i = 0; i < a.dim; i++) vector[i] *= (float)a.scaling;
            put_query(g, vector);
        }
    }

    // The angles of a rank, or of a query's position.
    void read_angles(const char *table, int64_t index, float *to) const {
        widen_all(a.type, table + index * 2 * a.half * bytes_of(a.type), 2 * a.half, to);
    }

    void read_unrotated_query() {
        const int64_t first = row * a.query_row + head * a.group * a.query_head;
        float *back = a.back ? turned : nullptr;  // no key is there yet
        if (back) read_angles(a.back, row, back);
        read_angles(a.angles, ranks.of((int32_t)now), own);
        for (int64_t g = 0; g < a.group; g++) {
            widen_all(a.type, a.query + (first + g * a.query_head) * bytes_of(a.type), a.dim, vector);
            turn_query<Float32>(vector, back, own, halves, (float)a.scaling, query + g * at.width);
        }
    }

    // Widen the key of a slot, undo what was done before it was coded, and turn the key to its rank.
    template <class C>
    void turn_key_of(int64_t s, float *to) {
        const auto *first = key_rows<C>().at(s);
        const uint16_t *scale = scales(a.key_codes, s);
        const Pairs pairs = keys.pairs;
        const int64_t second = C::BITS == 8 ? W : keys.bytes;  // from a pair's first vector to its second one
        for (int64_t j = 0; j < keys.groups; j++) {
            const Scaling by = scalings_of<C>(scale + j * C::HALVES, 0, 1);
            for (int64_t i = 0; i < pairs.n; i++) {
                const int64_t begin = pairs.begin(i);
                const auto *from = first + j * keys.bytes + begin;
                float *at = vector + j * keys.group + begin;
                const Pair codes = pairs.in_place() ? C::widen(from) : widen<C>(from, pairs.dim);
                const Pair x = {codes.a * by.scale + by.offset, codes.b * by.scale + by.offset};
                store(at, x.a, pairs.in_place() ? W : keys.bytes);
                if (pairs.in_place() || C::BITS == 4) store(at + second, x.b, pairs.in_place() ? W : keys.bytes);
                else if (keys.bytes > W) store(at + second, x.b, keys.bytes - W);
            }
        }
        reflect<true>(vector, a.normals, row, head, a.dim);
        hadamard(vector, a.dim);
        multiply_by_powers<1>(vector, a.exponents.of(row, head), a.dim);
        read_angles(a.angles, ranks.of(positions[s]), own);
        if (halves.part.in_place()) turn_key<Float32, true>(vector, own, halves, to);
        else turn_key<Float32, false>(vector, own, halves, to);
    }

    // Logits, under slot positions, of every block in which the query sees a slot.
    template <class C>
    void score_turned() {
        each_block([&](int64_t s) {
            const int64_t n = slots - s < W ? slots - s : W;
            for (int64_t i = 0; i < n; i++) turn_key_of<C>(s + i, turned + i * at.width);
            by_group(a.group, [&](int64_t g, auto heads) {
                Floats found[heads.value];
                const Rows<float> block = {turned, at.width};
                dots<Float32, heads.value, true>(query + g * at.width, at.width, Pairs(at.width), block, n, {}, found);
                for (int i = 0; i < heads.value; i++) store(logits + (g + i) * at.slots + s, found[i]);
            });
        });
    }

    void write_out() {
        for (int64_t g = 0; g < a.group; g++) {
            char *to = a.out + ((row * a.kv_heads + head) * a.group + g) * a.value_dim * bytes_of(a.type);
            const float factor = now < 0 ? 0.0f : scale[g];
            take_output(g, vector);
            for (int64_t i = 0; i < a.value_dim; i++) vector[i] *= factor;
            narrow_all(a.type, vector, a.value_dim, to);
        }
    }
};

// Code a token into slot `entry` of a head. `scratch`: see `coding_floats`. Returns whether it is finite.
inline bool code_token(const Write &w, int64_t row, int64_t head, int64_t entry, float *scratch) {
    float *key = scratch, *value = key + up(w.dim, W);
    int32_t *codes = (int32_t *)(value + up(w.value_dim, W));
    const auto read = [=](const char *from, int64_t at, int64_t dim, float *to) {
        widen_all(w.type, from + at * bytes_of(w.type), dim, to);
    };
    read(w.new_keys, row * w.new_key_row + head * w.new_key_head, w.dim, key);
    read(w.new_values, row * w.new_value_row + head * w.new_value_head, w.value_dim, value);
    const bool finite = all_finite(key, w.dim) && all_finite(value, w.value_dim);
    if (w.back) {
        float *angles = (float *)codes, *rotated = angles + up(w.dim, W);
        read(w.back, row * 2 * w.half, 2 * w.half, angles);
        std::memcpy(rotated, key, up(w.dim, W) * sizeof *key);
        unturn_key<Float32>(rotated, angles, w.half, key);
    }
    multiply_by_powers<-1>(key, w.exponents.of(row, head), w.dim);
    hadamard(key, w.dim);
    reflect(key, w.normals, row, head, w.dim);
    const auto put = [=](const float *x, const Coded &to, int64_t dim, char *numbers) {
        uint16_t *scales = (uint16_t *)to.scales + row * to.scale_row + head * to.scale_head + entry * to.scale_slot;
        by_bits(to.bits, [&](auto code) { code_vector<decltype(code)>(x, Grouping(to, dim), codes, numbers, scales); });
    };
    put(key, w.key_codes, w.dim, w.keys + row * w.key_row + head * w.key_head + entry * w.key_slot);
    put(value, w.value_codes, w.value_dim, w.values + row * w.value_row + head * w.value_head + entry * w.value_slot);
    return finite;
}

// Put a row's token, as codes, into the first free slot of a head, which stays empty if the token holds NaN or an
// infinity there. Returns the slot.
inline int64_t code_head(const Write &w, int64_t row, int64_t head, float *scratch) {
    const int64_t slot = take_slot(w, row, head);
    if (!code_token(w, row, head, entry_of(w, row, head, slot), scratch)) positions_of(w, row, head)[slot] = -1;
    return slot;
}

// Scratch floats of `code_head`: a key, a value, and codes or, before, angles and a key.
inline int64_t coding_floats(int64_t dim, int64_t value_dim) {
    return up(dim, W) + up(value_dim, W) + std::max(2 * up(dim, W), up(value_dim, W));
}

}  // namespace

// The second reading of a prompt: a block's queries, turned ahead, against all keys, a piece at a time.

#pragma once

#include "block.h"

namespace {

// After the first reading of the same block in the same scratch memory, which leaves what its rows have seen.
class Again : Block {
    static constexpr float MOST = 80.0f;  // logits above what the first reading has seen; e^88.7 is the largest float
    static constexpr int64_t STEP = 2 * SQUARE;
    const bool keeps = plan.keeps_again();
    const float times = by(plan.second);

   public:
    Again(const Plan &plan, Packed held, int64_t i, int64_t first, int64_t tokens, float *scratch)
        : Block(plan, held, i, first, tokens, scratch) {}

    // Take the logs of the largest shares of the keys. A share needs the sum over all keys, so they are read twice.
    template <class X>
    void run(float *shares) {
        list_panels();
        const int64_t each = a.tokens * a.dim;
        take_queries<X>(a.again, a.kv_heads * a.group * each, each, a.dim, plan.second != IN_FLOATS);
        add_exponentials();
        if (!find_totals()) find_far_totals();
        each_piece(false, [&](const Logits &x) {
            for (int64_t i = 0; i < x.panels; i++) raise(x, i, shares + ids[x.c + i] * PANEL);
        });
    }

   private:
    // Logits of rows [begin, end) to panels from c on, still to be multiplied with `times`.
    struct Logits {
        float *at;
        int64_t begin, end, c, panels;

        float *row(int64_t r) const { return at + (r - begin) * NEAR_WIDTH; }
        int64_t keys() const { return panels * PANEL; }
    };

    void list_panels() {
        for (int64_t panel = 0; panel < plan.panels; panel++)
            if (held.most[panel] >= 0) ids[active++] = (int32_t)panel;
    }

    // Call what(logits) for some rows and a piece of the keys at a time. `fresh`: for the first time.
    template <class What>
    void each_piece(bool fresh, const What &what) {
        const int64_t step = plan.second == IN_SQUARES ? STEP : plan.step;
        for (int64_t c = 0, n; c < active; c += n) {
            n = of_piece(c);
            for (int64_t r = 0; r < real_rows(); r += step) {
                const Logits x{keeps ? kept_of(c, r) : near, r, std::min(real_rows(), r + step), c, n};
                if (fresh || !keeps) {
                    multiply(plan.second, r, std::min(rows, r + step), c, n, x.at);
                    for (int64_t i = 0; i < n; i++) mask(x, i);
                }
                what(x);
            }
        }
    }

    // Soft cap, and minus infinity for empty slots, in the logits to a panel.
    void mask(const Logits &x, int64_t i) const {
        const float softcap = (float)a.softcap;
        const int32_t panel = ids[x.c + i];
        if (softcap == 0.0f && !held.gaps[panel]) return;
        for (int64_t j = 0; j < PANEL; j += W) {
            const Ints there = load<Ints>(held.positions + panel * PANEL + j) >= 0;
            for (int64_t r = x.begin; r < x.end; r++) {
                float *const one = x.row(r) + i * PANEL + j;
                Floats logits = load<Floats>(one);
                if (softcap != 0.0f) logits = tanh(logits * left(plan.second) / softcap) * softcap;
                store(one, select(there, logits, all(-INFINITY)));
            }
        }
    }

    // Add f(r, logits) to each row's total, lane by lane, for all keys.
    template <class F>
    void add_all(bool fresh, const F &f) {
        std::memset(totals, 0, plan.rows_each * W * sizeof *totals);
        each_piece(fresh, [&](const Logits &x) {
            for (int64_t r = x.begin; r < x.end; r++) {
                const float *const one = x.row(r);
                Floats total = load<Floats>(totals + r * W);
                for (int64_t i = 0; i < x.keys(); i += W) total += f(r, load<Floats>(one + i));
                store(totals + r * W, total);
                if (plan.second == IN_SQUARES && r % AWAKE_ROWS == 0) stay_awake();
            }
        });
    }

    void add_exponentials() {
        if (plan.second == IN_SQUARES)
            return add_all(true, [this](int64_t r, Floats x) { return exp_for_halves(x * times - known[r]); });
        add_all(true, [this](int64_t r, Floats x) {
            const Floats more = x * times - known[r];
            return exp_of_small(all(MOST) < more ? all(MOST) : more);
        });
    }

    // The logs of the sums of all exponentials, those of the first reading included; a row that does not count gets
    // infinity. False if some logit is far above the first reading, or is no number.
    bool find_totals() {
        bool near_enough = true;
        for (int64_t r = 0; r < real_rows(); r++) {
            const float total = 1.0f + sum(load<Floats>(totals + r * W));
            shown[r] = at[r] >= 1 && !(total < std::exp(MOST - 1.0f));
            near_enough &= !shown[r];
            if (!shown[r]) known[r] = at[r] < 1 ? INFINITY : known[r] + std::log(total);
        }
        return near_enough;
    }

    // The same for rows whose exponentials are too large, relative to their largest logit.
    void find_far_totals() {
        for (int64_t r = 0; r < real_rows(); r++) store(totals + r * W, all(known[r]));
        each_piece(false, [&](const Logits &x) {
            for (int64_t r = x.begin; r < x.end; r++)
                for (int64_t i = 0; i < x.keys(); i += W) {
                    const Floats logits = load<Floats>(x.row(r) + i) * times, top = load<Floats>(totals + r * W);
                    store(totals + r * W, select(logits > top, logits, top));
                }
        });
        for (int64_t r = 0; r < real_rows(); r++) most[r] = largest(load<Floats>(totals + r * W));
        add_all(false, [this](int64_t r, Floats x) { return exp(x * times - most[r]); });
        for (int64_t r = 0; r < real_rows(); r++) {
            const float total = sum(load<Floats>(totals + r * W)) + std::exp(known[r] - most[r]);
            if (shown[r]) known[r] = most[r] + std::log(total);
        }
    }

    // Raise the logs of a panel's shares to those of some rows.
    void raise(const Logits &x, int64_t i, float *shares) const {
        Floats top[TILE];
        for (int j = 0; j < TILE; j++) top[j] = load<Floats>(shares + j * W);
        for (int64_t r = x.begin; r < x.end; r++)
            for (int j = 0; j < TILE; j++) {
                const Floats share = load<Floats>(x.row(r) + i * PANEL + j * W) * times - known[r];
                top[j] = share > top[j] ? share : top[j];
            }
        for (int j = 0; j < TILE; j++) store(shares + j * W, top[j]);
    }
};

}  // namespace

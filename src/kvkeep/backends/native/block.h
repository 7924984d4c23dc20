// A block of a prompt's query rows: attention to the keys that it sees, a piece of them at a time.

#pragma once

#include "squares.h"

namespace {

// One block of query rows of one head. Rows are sorted by token, then by query head.
class Block {
   protected:
    const Plan &plan;
    const Prefill &a;
    const Packed held;
    const int64_t row, head, first, tokens, rows;
    float *const kept;  // weights of all keys, or tempered ones, if somebody needs them
    float *const near;  // the logits of a piece, and weights that are not kept
    float *const query, *const out, *const totals, *const tempered_totals;
    float *const scale, *const temper, *const known, *const most;  // per row; `most`: about its largest logit so far
    float *const then;                                             // that logit at each piece of what is kept
    int32_t *const shown, *const at, *const ids;
    int64_t active = 0;

    Block(const Plan &plan, Packed held, int64_t i, int64_t first, int64_t tokens, float *scratch)
        : plan(plan), a(plan.a), held(held), row(i / a.kv_heads), head(i % a.kv_heads), first(first), tokens(tokens),
          rows(up(tokens * a.group, plan.unit)), kept(scratch), near(kept + plan.kept),
          query(near + plan.step * NEAR_WIDTH), out(query + plan.rows_each * plan.query),
          totals(out + plan.rows_each * plan.value_dim.floats()),
          tempered_totals(totals + plan.rows_each * W), scale(tempered_totals + plan.rows_each * W),
          temper(scale + plan.rows_each), known(temper + plan.rows_each), most(known + plan.rows_each),
          then(most + plan.rows_each), shown((int32_t *)(then + plan.kept_rows * plan.pieces)),
          at(shown + plan.rows_each), ids(at + plan.rows_each) {}

    int64_t real_rows() const { return tokens * a.group; }

    // The newest position behind the window.
    int32_t behind(int32_t now) const { return a.window ? (int32_t)(now - a.window) : INT32_MIN; }

    // List the panels with a key that some row sees. Keys behind the window count as low, so they are seen there.
    void find_panels() {
        int32_t least = INT32_MAX, newest = -1;
        for (int64_t r = 0; r < real_rows(); r++) {
            at[r] = (int32_t)a.now[row * a.tokens + first + r / a.group];
            newest = std::max(newest, at[r]);
            if (at[r] >= 0) least = std::min(least, at[r]);
        }
        const int32_t hidden = a.lows ? INT32_MIN : behind(least);
        for (int64_t panel = 0; panel < plan.panels; panel++)
            if (held.most[panel] > hidden && held.most[panel] >= 0 && held.least[panel] <= newest)
                ids[active++] = (int32_t)panel;
    }

    // The logit that a row's weights are relative to.
    float base(int64_t r) const { return most[r] == -INFINITY ? 0.0f : most[r]; }

    // Lay out the queries; `pairs`: as narrow numbers, otherwise as floats times the scaling. Steps count elements.
    template <class X>
    void take_queries(const char *queries, int64_t row_step, int64_t head_step, int64_t token_step, bool pairs) {
        typedef typename X::T T;
        for (int64_t r = 0; r < rows; r++) {
            const T *from = (const T *)queries + row * row_step + (head * a.group + r % a.group) * head_step +
                            (first + r / a.group) * token_step;
            if (r >= real_rows()) from = nullptr;  // only fills a unit up
            !pairs ? widen<X>(r, from) : plan.split ? split<X>(r, from) : copy<X>(r, from);
        }
    }

    // What products still have to be multiplied with when they become logits.
    float left(Product products) const { return products == IN_FLOATS ? 1.0f : (float)a.scaling; }

    // What masked logits are still to be multiplied with: soft caps have needed the logits themselves.
    float by(Product products) const { return a.softcap == 0.0 ? left(products) : 1.0f; }

    // How many panels of the same piece follow from one on.
    int64_t of_piece(int64_t c) const {
        int64_t n = 1;
        while (c + n < active && ids[c + n] / PIECE == ids[c] / PIECE) n++;
        return n;
    }

    // What is kept of a row's piece that begins with panel c. All rows of a piece lie together.
    float *kept_of(int64_t c, int64_t r) const {
        return kept + (ids[c] / PIECE * plan.kept_rows + r) * NEAR_WIDTH;
    }

    // Multiply some rows with n panels of a piece.
    void multiply(Product products, int64_t begin, int64_t end, int64_t c, int64_t n, float *to) const {
        for (int64_t i = 0; i < n; i++)
            for (int64_t r = begin; r < end; r += products == IN_SQUARES ? SQUARE : ROWS)
                dots_of(products, ids[c + i], r, to + (r - begin) * NEAR_WIDTH + i * PANEL);
    }

    // Attend. Outputs and weights still have to be multiplied with `scale`. `keeps`: keep the weights of all keys; those
    // of a piece are relative to its logit in `then`.
    void attend(bool keeps) {
        begin_rows(keeps);
        for (int64_t c = 0, n; c < active; c += n) {
            n = of_piece(c);
            for (int64_t r = 0; r < rows; r += plan.step)
                attend_piece(r, std::min(rows, r + plan.step), c, keeps ? n : n - unseen(r, c, n), keeps);
        }
        for (int64_t r = 0; r < real_rows(); r++) end_row(r);
    }

    template <class X>
    void write_outputs() const {
        const int64_t dim = plan.value_dim.floats();
        for (int64_t r = 0; r < real_rows(); r++) {
            const int64_t query_head = (row * a.kv_heads + head) * a.group + r % a.group;
            auto *to = (typename X::T *)a.out + (query_head * a.tokens + first + r / a.group) * a.value_dim;
            if (plan.squares) put_all_narrow(out + r * dim, scale[r], (uint16_t *)to, a.value_dim);
            else write<X>(r, to);
        }
    }

   private:
    // How many of n panels, counted from the last one, no row of a step sees.
    int64_t unseen(int64_t begin, int64_t c, int64_t n) const {
        int32_t newest = -1;
        for (int64_t r = begin; r < std::min(begin + plan.step, real_rows()); r++) newest = std::max(newest, at[r]);
        int64_t found = 0;
        while (found < n && held.least[ids[c + n - 1 - found]] > newest) found++;
        return found;
    }

    // Add n panels of a piece to the outputs of some rows.
    void attend_piece(int64_t begin, int64_t end, int64_t c, int64_t n, bool keeps) {
        float *const to = keeps && !a.gains ? kept_of(c, begin) : near;
        multiply(plan.first, begin, end, c, n, near);
        for (int64_t r = begin; r < std::min(end, real_rows()); r++) {
            float *const logits = near + (r - begin) * NEAR_WIDTH;
            raise(r, largest_of(r, c, n, logits));
            if (keeps) then[r * plan.pieces + ids[c] / PIECE] = most[r];
            if (keeps && a.gains)
                plan.squares ? temper_logits<exp_for_halves>(r, n, logits, kept_of(c, r))
                             : temper_logits<exp_of_small>(r, n, logits, kept_of(c, r));
            weigh(r, n, logits, to + (r - begin) * NEAR_WIDTH);
            if (plan.squares && r % AWAKE_ROWS == 0) stay_awake();
        }
        mix(end - begin, c, n, to, begin);
    }

    template <class X>
    void widen(int64_t r, const typename X::T *from) {
        for (int64_t i = 0; i < plan.dim.n; i++) {
            const Pair q = pair_of<X>(from, plan.dim, i);
            store(query + r * plan.dim.floats() + i * 2 * W, q.a * (float)a.scaling);
            store(query + r * plan.dim.floats() + i * 2 * W + W, q.b * (float)a.scaling);
        }
    }

    template <class X>
    void copy(int64_t r, const typename X::T *from) {
        int32_t *const to = (int32_t *)query + r * plan.pairs;
        std::memset(to, 0, plan.pairs * sizeof *to);
        if (from) std::memcpy(to, from, a.dim * sizeof *from);
    }

    template <class X>
    void split(int64_t r, const typename X::T *from) {
        ::split<X>(from, plan.dim, (uint16_t *)((int32_t *)query + r * plan.pairs), plan.dim.floats());
    }

    void dots_of(Product products, int64_t panel, int64_t r, float *to) const {
        const int64_t dim = plan.dim.floats(), pairs = plan.pairs;
        const int32_t *const queries = (int32_t *)query + r * pairs, *const keys = held.pairs + panel * PANEL * pairs;
        if (plan.split && products == IN_SQUARES) dots_of_split(queries, pairs, keys, to, NEAR_WIDTH);
        else if (products == IN_SQUARES) dots_in_squares(queries, pairs, keys, to, NEAR_WIDTH);
        else if (products == IN_PAIRS) dots_of_pairs(queries, pairs, keys, to, NEAR_WIDTH);
        else dots(query + r * dim, dim, held.keys + panel * PANEL * dim, to, NEAR_WIDTH);
    }

    void mix(int64_t n_rows, int64_t c, int64_t n, const float *weights, int64_t r) {
        const int64_t dim = plan.value_dim.floats();
        float *const to = out + r * dim;
        if (plan.squares) mix_panels_in_squares(weights, NEAR_WIDTH, n_rows, held.values, ids + c, n, dim, to);
        else mix_panels(weights, NEAR_WIDTH, n_rows, held.values, ids + c, n, dim, to);
    }

    // A sink is a logit without a value.
    void begin_rows(bool keeps) {
        std::memset(out, 0, rows * plan.value_dim.floats() * sizeof *out);
        std::memset(totals, 0, 2 * plan.rows_each * W * sizeof *totals);  // and the tempered ones
        for (int64_t r = 0; r < real_rows(); r++) {
            const float sink = a.sinks ? a.sinks[head * a.group + r % a.group] : -INFINITY;
            most[r] = sink;
            totals[r * W] = sink == -INFINITY ? 0.0f : std::exp(sink - sink);
            shown[r] = false;
            for (int64_t i = 0; keeps && i < plan.pieces; i++) then[r * plan.pieces + i] = -INFINITY;
        }
    }

    // The largest of a row's logits to n panels, lane by lane, after soft cap and mask.
    Floats largest_of(int64_t r, int64_t c, int64_t n, float *x) {
        const int32_t now = at[r], hidden = behind(now);
        Floats top[TILE];
        for (int i = 0; i < TILE; i++) top[i] = all(-INFINITY);
        for (int64_t i = 0; i < n; i++) {
            const int32_t panel = ids[c + i];
            const bool whole = !held.gaps[panel] && held.most[panel] <= now && held.least[panel] > hidden;
            if (whole) shown[r] = true;
            if (!whole || a.softcap != 0.0) mask(r, panel, x + i * PANEL);
            for (int64_t j = 0; j < TILE; j++) {
                const Floats logits = load<Floats>(x + i * PANEL + j * W);
                top[j] = logits > top[j] ? logits : top[j];
            }
        }
        for (int i = 1; i < TILE; i++) top[0] = top[i] > top[0] ? top[i] : top[0];
        return top[0];
    }

    // Soft cap and mask a row's logits to a panel.
    void mask(int64_t r, int32_t panel, float *x) {
        const int32_t now = at[r], hidden = behind(now);
        const float softcap = (float)a.softcap;
        Ints seen = {};
        for (int64_t i = 0; i < PANEL; i += W) {
            const Ints k = load<Ints>(held.positions + panel * PANEL + i);
            const Ints show = (k >= 0) & (k <= now) & (k > hidden);
            Floats logits = load<Floats>(x + i);
            if (softcap != 0.0f) logits = tanh(logits * left(plan.first) / softcap) * softcap;
            store(x + i, select(show, logits, all(-INFINITY)));
            seen |= show;
        }
        if (!shown[r]) shown[r] = any(seen);
    }

    // How far a logit may be above the one that weights are relative to, so that few rows are scaled down again.
    float slack() const { return a.gains ? std::min(SLACK, SLACK / std::max(a.gains[row], 1.0f)) : SLACK; }

    // Make the weights so far relative to a larger logit, if there is one that is much larger.
    void raise(int64_t r, Floats top) {
        top = in_register(top * by(plan.first));
        if (!any(top > most[r] + slack())) return;
        const float now = largest(top), before = std::exchange(most[r], now);
        if (before == -INFINITY) return;  // nothing weighs anything yet
        const Floats less = exp_of_small(all(before - now));
        float *const to = out + r * plan.value_dim.floats();
        for (int64_t d = 0; d < plan.value_dim.floats(); d += W) store(to + d, load<Floats>(to + d) * less);
        store(totals + r * W, load<Floats>(totals + r * W) * less);
        if (a.gains) {
            const Floats other = exp_of_small(all((before - now) * a.gains[row]));
            store(tempered_totals + r * W, load<Floats>(tempered_totals + r * W) * other);
        }
    }

    // Turn logits into weights: floats, or halves for products in squares.
    void weigh(int64_t r, int64_t n, const float *x, float *to) {
        const float less = base(r), times = by(plan.first);
        Floats total = load<Floats>(totals + r * W);
        const auto logits = [&](int64_t i) {
            return in_register(load<Floats>(x + i) * times) - less;  // rounded as `most`, so none is far above it
        };
        if (plan.squares)
            for (int64_t i = 0; i < n * PANEL; i += 2 * W) {
                const Floats one = exp_for_halves(logits(i)), two = exp_for_halves(logits(i + W));
                total += one;
                total += two;
                put_halves(one, two, to + i);
            }
        else
            for (int64_t i = 0; i < n * PANEL; i += W) {
                const Floats e = exp_of_small(logits(i));
                total += e;
                store(to + i, e);
            }
        store(totals + r * W, total);
    }

    // The weights of logits times a gain.
    template <Floats power(Floats)>
    void temper_logits(int64_t r, int64_t n, const float *x, float *to) {
        const float less = base(r), times = by(plan.first), gain = a.gains[row];
        Floats total = load<Floats>(tempered_totals + r * W);
        for (int64_t i = 0; i < n * PANEL; i += W) {
            const Floats logits = in_register(load<Floats>(x + i) * times) - less;
            const Floats e = select(logits > -INFINITY, power(logits * gain), Floats{});
            store(to + i, e);
            total += e;
        }
        store(tempered_totals + r * W, total);
    }

    void end_row(int64_t r) {
        const float all_of_it = sum(load<Floats>(totals + r * W));
        const bool blind = most[r] == -INFINITY && !shown[r];  // otherwise all logits are -inf, and the result is NaN
        scale[r] = blind ? 0.0f : 1.0f / all_of_it;
        known[r] = blind ? -INFINITY : most[r] + std::log(all_of_it);
        const float other = a.gains ? sum(load<Floats>(tempered_totals + r * W)) : 0.0f;
        temper[r] = a.gains && !blind ? 1.0f / std::max(other, 1e-37f) : scale[r];
    }

    template <class X>
    void write(int64_t r, typename X::T *to) const {
        for (int64_t d = 0; d < a.value_dim; d += 2 * W) {
            const float *from = out + r * plan.value_dim.floats() + d;
            const Pair mixed = {load<Floats>(from) * scale[r], load<Floats>(from + W) * scale[r]};
            if (d + 2 * W <= a.value_dim) X::narrow(mixed, to + d);
            else ::narrow<X>(mixed, to + d, a.value_dim - d);
        }
    }
};

}  // namespace

// Attention of a prompt's tokens: the work of all heads on torch's threads, and the sums of their parts.

#pragma once

#include "prefill.h"

namespace {

template <class X>
int64_t prefill_as(const Prefill &a) {
    const Plan plan(a);
    const int64_t heads = a.rows * a.kv_heads, fields = a.masses + a.lows, padded = plan.panels * PANEL;
    const Scratch memory(plan.heads_each * plan.packed), partial(plan.heads_each * plan.parts * plan.partial);
    if (!memory.get() || !partial.get()) return -1;
    for (int64_t start = 0; start < heads; start += plan.heads_each) {
        const int64_t n = std::min(plan.heads_each, heads - start), bytes = n * padded * a.tokens * 4;
        const auto held = [&](int64_t i) { return plan.head(memory.get() + i * plan.packed); };
        bool done = for_each(n * plan.panels, bytes, a.threads, 0, [&](int64_t i, float *) {
            const int64_t which = start + i / plan.panels;
            pack<X>(plan, which / a.kv_heads, which % a.kv_heads, i % plan.panels, held(i / plan.panels));
        });
        done = done && for_each(n * plan.parts, bytes, a.threads, plan.scratch, [&](int64_t i, float *scratch) {
            const int64_t part = plan.parts - 1 - i / n, which = i % n;  // the last ones see most keys
            float *sums = partial.get() + (which * plan.parts + part) * plan.partial;
            std::memset(sums, 0, fields * padded * sizeof *sums);
            if (a.again) std::fill_n(sums + fields * padded, padded, -INFINITY);
            for (int64_t b = part * plan.blocks / plan.parts; b < (part + 1) * plan.blocks / plan.parts; b++) {
                Block<X> block(plan, held(which), start + which, b, scratch);
                block.run(sums, padded);
                if (a.again) block.read_again(sums + fields * padded);
            }
        });
        done = done && for_each(n * fields, bytes, a.threads, 0, [&](int64_t i, float *) {
            const int64_t which = i / fields, field = i % fields;
            float *to = a.sums + (field * heads + start + which) * plan.slots;
            const float *from = partial.get() + which * plan.parts * plan.partial + field * padded;
            for (int64_t j = 0; j < plan.slots; j++) {
                float total = 0.0f;
                for (int64_t part = 0; part < plan.parts; part++) total += from[part * plan.partial + j];
                to[j] = total;
            }
        });
        done = done && for_each(a.again ? n : 0, bytes, a.threads, 0, [&](int64_t i, float *) {
            const float *from = partial.get() + i * plan.parts * plan.partial + fields * padded;
            for (int64_t j = 0; j < plan.slots; j++) {
                float most = from[j];
                for (int64_t part = 1; part < plan.parts; part++) most = std::max(most, from[part * plan.partial + j]);
                a.shares[(start + i) * plan.slots + j] = std::exp(most);
            }
        });
        if (!done) return -1;
    }
    return 0;
}

}  // namespace

// One generated token per row on the CPU: write it into a free slot, attend, empty the weakest slot.
//
// A plain C interface. Every function takes one struct of 8-byte fields, which ops.py packs in the same order, and
// returns -1 if there was no memory. Strides count elements; the last axis of every tensor is dense. Axis letters are
// those of types.py: B rows, Hk KV heads, G query heads per KV head, S slots, D and E dims of keys and values.
//
// A head of a row is the unit of work: one thread does it from beginning to end in a fixed order, so results do not
// depend on the number of threads. Its keys are read once and its values once, for all G query heads together.
//
// Vectors are the compilers' own (GCC and Clang, x86 and ARM), so nothing here needs -ffast-math, under which NaN and
// infinity mean nothing and which, in a shared library, makes the whole process flush denormal numbers.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

// W floats make a vector. TILE keys (or vectors of a value) times GROUP query heads are summed in registers at a time.
#if defined(__AVX512F__)
constexpr int W = 16, TILE = 4;  // 32 registers
#elif defined(__AVX__)
constexpr int W = 8, TILE = 2;  // 16 registers
#elif defined(__x86_64__)
constexpr int W = 4, TILE = 2;
#else
constexpr int W = 4, TILE = 4;
#endif
constexpr int GROUP = 4;
constexpr int64_t AHEAD = 4096;  // bytes of keys or values that are on their way from memory before they are used
constexpr int SPAN = 128;        // slots whose values stay in the nearest cache while all query heads and dims use them

typedef float Floats __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef uint32_t Bits __attribute__((vector_size(4 * W)));

template <class V, class T>
inline V load(const T *from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class V, class T>
inline void store(T *to, V v) {
    std::memcpy(to, &v, sizeof v);
}

inline Floats all(float x) { return x - Floats{}; }
inline Ints all(int32_t x) { return x - Ints{}; }
inline Ints select(Ints which, Ints yes, Ints no) { return (which & yes) | (~which & no); }
inline Floats select(Ints which, Floats yes, Floats no) { return (Floats)select(which, (Ints)yes, (Ints)no); }

// Compilers would rather load a number again for each use than keep it in a register; loads are what is scarce here.
inline Floats in_register(Floats x) {
#if defined(__x86_64__)
    asm("" : "+v"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#endif
    return x;
}

// ---- element types --------------------------------------------------------------------------------------------------

// Elements are widened two vectors at a time, in an order that costs nothing: half-precision numbers lie in pairs, so
// one vector gets the even ones and the other the odd ones. Queries, sums and outputs follow, and narrowing undoes it.
struct Pair {
    Floats a, b;
};

struct Float32 {
    typedef float T;
    static Pair widen(const T *from) { return {load<Floats>(from), load<Floats>(from + W)}; }
    static void narrow(Pair x, T *to) {
        store(to, x.a);
        store(to + W, x.b);
    }
};

struct BFloat16 {
    typedef uint16_t T;
    static Pair widen(const T *from) {
        const Bits both = load<Bits>(from);
        return {(Floats)(both << 16), (Floats)(both & 0xffff0000)};
    }
    static void narrow(Pair x, T *to) { store(to, (round(x.a) >> 16) | (round(x.b) & 0xffff0000)); }
    static Bits round(Floats x) {  // in the upper half, to nearest, ties to even
        const Bits u = (Bits)x;
        return (Bits)select(x != x, (Ints)(u | 0x400000), (Ints)(u + 0x7fff + ((u >> 16) & 1)));
    }
};

struct Float16 {
    typedef uint16_t T;
    static Pair widen(const T *from) {
        const Ints both = load<Ints>(from);
        return {widen(both << 16), widen(both)};
    }
    static Floats widen(Ints upper) {  // a product rebiases the exponent, which is right for denormals, too
        const Ints small = (upper >> 3) & (int32_t)0x8fffe000, special = (small & 0x0f800000) == 0x0f800000;
        return (Floats)((Ints)((Floats)small * 0x1p112f) | (special & 0x7f800000));
    }
    static void narrow(Pair x, T *to) { store(to, round(x.a) | (round(x.b) << 16)); }
    static Bits round(Floats x) {
        const Bits u = (Bits)x, size = u & 0x7fffffff;
        const Bits normal = (size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13;
        const Bits denormal = (Bits)((Floats)size + 0.5f) - 0x3f000000;
        Ints found = select(size < 0x38800000, (Ints)denormal, (Ints)normal);
        found = select(size >= 0x477ff000, all(0x7c00), found);  // from 65520 on the nearest is infinity
        found = select(size > 0x7f800000, all(0x7e00), found);
        return (Bits)found | ((u >> 16) & 0x8000);
    }
};

// A vector of `dim` elements as pairs of 2 W. The last pair ends where the vector ends, so it overlaps the one before
// unless dim is a multiple of 2 W; only vectors shorter than 2 W are not read in place.
struct Pairs {
    int64_t dim, n;

    explicit Pairs(int64_t dim) : dim(dim), n((dim + 2 * W - 1) / (2 * W)) {}
    bool in_place() const { return dim >= 2 * W; }
    int64_t floats() const { return n * 2 * W; }
    int64_t elements() const { return in_place() ? 2 * W : dim; }  // of each pair
    int64_t begin(int64_t i) const {
        const int64_t at = i * 2 * W;
        return in_place() && at + 2 * W > dim ? dim - 2 * W : at;
    }
};

// The first n elements, and zeros; the first `without` of them are zeros, too.
template <class X>
inline Pair widen(const typename X::T *from, int64_t n, int64_t without = 0) {
    typename X::T part[2 * W] = {};
    std::memcpy(part, from, n * sizeof *from);
    std::memset(part, 0, without * sizeof *from);
    return X::widen(part);
}

template <class X>
inline void narrow(Pair x, typename X::T *to, int64_t n) {
    typename X::T part[2 * W];
    X::narrow(x, part);
    std::memcpy(to, part, n * sizeof *to);
}

// ---- functions of vectors -------------------------------------------------------------------------------------------

// A polynomial, the highest coefficient first.
template <int N>
inline Floats polynomial(Floats x, const float (&coefficients)[N]) {
    Floats y = all(coefficients[0]);
    for (int i = 1; i < N; i++) y = y * x + coefficients[i];
    return y;
}

// e to the x, to two units in the last place; 0 below -87.3, infinity above 88.7, NaN of NaN.
inline Floats exp(Floats x) {
    const Ints inside = (x >= -87.3f) & (x <= 88.7f);
    const Floats y = select(inside, x, Floats{});
    const Floats n = (y * 1.44269504f + 0x1.8p23f) - 0x1.8p23f;  // to the next whole number: there is no room for more
    const Floats r = y - n * 0x1.62ep-1f - n * 3.19461833e-5f;   // minus n times log 2, in two parts
    const Floats p = polynomial(r, {1.38131448e-3f, 8.36941879e-3f, 4.16684560e-2f, 0.166665152f, 0.499999940f});
    const Floats power = (Floats)((Ints)(p * (r * r) + r + 1.0f) + (__builtin_convertvector(n, Ints) << 23));
    return select(inside, power, select(x > 88.7f, all(INFINITY), select(x < -87.3f, Floats{}, x)));
}

inline Floats tanh(Floats x) {
    const Floats size = (Floats)((Ints)x & INT32_MAX), square = x * x;
    const Floats p = polynomial(square, {-6.64748671e-3f, 2.12979913e-2f, -5.38991913e-2f, 0.133329645f, -0.333333284f});
    const Floats small = p * square * size + size, large = 1.0f - 2.0f / (exp(size + size) + 1.0f);
    return (Floats)((Ints)select(size < 0.5f, small, large) | ((Ints)x & INT32_MIN));
}

inline float sum(Floats v) {
    float total = 0.0f;
    for (int i = 0; i < W; i++) total += v[i];
    return total;
}

inline int32_t sum(Ints v) {
    int32_t total = 0;
    for (int i = 0; i < W; i++) total += v[i];
    return total;
}

inline bool any(Ints v) {
    int64_t part[W / 2], found = 0;
    std::memcpy(part, &v, sizeof v);
    for (int i = 0; i < W / 2; i++) found |= part[i];
    return found != 0;
}

inline float largest(Floats v) {
    float most = v[0];
    for (int i = 1; i < W; i++) most = v[i] > most ? v[i] : most;
    return most;
}

// Which lane of two vectors of N-lane segments comes to lane i when the first halves of all segments are collected.
constexpr int place(int i, int N) {
    const int segment = i / (N / 2), each = W / N;
    return (segment < each ? segment * N : W + (segment - each) * N) + i % (N / 2);
}

// Two vectors of N-lane segments become one of twice as many segments, half as long, with the same sums.
template <int N, int... I>
inline Floats fold(Floats a, Floats b, std::integer_sequence<int, I...>) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, place(I, N)...) + __builtin_shufflevector(a, b, (place(I, N) + N / 2)...);
#else
    return __builtin_shuffle(a, b, Ints{place(I, N)...}) + __builtin_shuffle(a, b, Ints{(place(I, N) + N / 2)...});
#endif
}

// COUNT vectors of N-lane segments, folded into the first; the segments keep their order.
template <int COUNT, int N>
inline Floats gather(Floats *parts) {
    if constexpr (COUNT > 1) {
        for (int i = 0; i < COUNT / 2; i++)
            parts[i] = fold<N>(parts[2 * i], parts[2 * i + 1], std::make_integer_sequence<int, W>());
        gather<COUNT / 2, N / 2>(parts);
    }
    return parts[0];
}

// ---- work in parallel -----------------------------------------------------------------------------------------------

constexpr int64_t WORTH_A_THREAD = 1 << 17;  // bytes that are read in the time that waking other threads takes

inline int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Memory for floats that begins with a cache line; null if there is none left.
class Scratch {
    static constexpr std::align_val_t LINE{64};
    void *memory;

   public:
    explicit Scratch(int64_t floats) : memory(::operator new(floats * sizeof(float), LINE, std::nothrow)) {}
    ~Scratch() { ::operator delete(memory, LINE); }
    Scratch(const Scratch &) = delete;
    float *get() const { return (float *)memory; }
};

// Call work(i, scratch) for every i below n. False: there was no memory for so many scratch floats.
template <class Work>
bool for_each(int64_t n, int64_t bytes, int64_t threads, int64_t floats, const Work &work) {
    if (bytes < WORTH_A_THREAD || n < 2) threads = 1;
    const int64_t each = up(floats, 32);
    const Scratch scratch(each * threads);
    if (!scratch.get()) return false;
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
        for (int64_t i = 0; i < n; i++) work(i, scratch.get() + omp_get_thread_num() * each);
        return true;
    }
#endif
    for (int64_t i = 0; i < n; i++) work(i, scratch.get());
    return true;
}

}  // namespace

// ---- attention ------------------------------------------------------------------------------------------------------

enum Kind { NOTHING, MASS, MASS_AND_LAST, MASS_AND_LOW };

extern "C" struct Attend {
    int64_t rows, kv_heads, group, slots, dim, value_dim, threads;
    int64_t type;  // of query, keys, values and output: 0 float32, 1 bfloat16, 2 float16
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
    float *mass, *extra;     // dense; extra: the last row's mass, or low
    const int64_t *counted;  // per row: it counts if above 0; null: all count if `counts`
    int64_t counts;
    const float *gains;  // per row; null: `gain` for all
    int64_t has_gain;
    const int64_t *newest;  // per row, what decay counts from; null: `last` for all
    int64_t last, live;
    double scaling, softcap, gain, decay, theta;  // softcap 0 for none
};

namespace {

// What one head needs beside the tensors: offsets into scratch memory, in floats.
struct Layout {
    Pairs dim, value_dim;
    int64_t slots, query, logits, tempered, out, shown, scale, size;

    explicit Layout(const Attend &a) : dim(a.dim), value_dim(a.value_dim), slots(up(a.slots, W)) {
        query = 0;
        logits = query + a.group * dim.floats();
        tempered = logits + a.group * slots;
        out = tempered + (a.has_gain ? a.group * slots : 0);
        shown = out + a.group * value_dim.floats();
        scale = shown + slots;
        size = scale + 2 * a.group;
    }
};

// Fetch n elements into the second-level cache; into the first it does not pay. Any address will do.
template <class T>
inline void fetch(const T *from, int64_t n) {
    for (int64_t i = 0; i < n * (int64_t)sizeof(T); i += 64) __builtin_prefetch((const char *)from + i, 0, 2);
}

// Keys or values, one behind the other.
template <class T>
struct Rows {
    const T *first;
    int64_t stride;

    const T *at(int64_t i) const { return first + i * stride; }
    Rows from(int64_t i) const { return {at(i), stride}; }
};

template <class X>
inline int64_t rows_ahead(int64_t dim) {
    return AHEAD / (dim * (int64_t)sizeof(typename X::T));
}

// Dot products of N queries with the W keys of a block, of which n exist; the last one stands in for the others.
// `later` are as many rows that will be wanted soon.
template <class X, int N, bool IN_PLACE>
inline void dots(const float *query, Pairs pairs, Rows<typename X::T> keys, int64_t n, Rows<typename X::T> later,
                 Floats *logits) {
    Floats parts[N][W / TILE];
    for (int s = 0; s < W; s += TILE) {
        const typename X::T *key[TILE];
        for (int i = 0; i < TILE; i++) key[i] = keys.at(s + i < n ? s + i : n - 1);
        for (int i = 0; i < TILE; i++) fetch(later.at(s + i), pairs.dim);
        Floats acc[N][TILE] = {};
        const auto add = [&](int64_t at, int64_t begin) {
            Pair k[TILE];
            for (int i = 0; i < TILE; i++)
                k[i] = IN_PLACE ? X::widen(key[i] + begin) : widen<X>(key[i], pairs.dim);
            for (int g = 0; g < N; g++) {
                const float *q = query + g * pairs.floats() + at;
                const Floats a = in_register(load<Floats>(q)), b = in_register(load<Floats>(q + W));
                for (int i = 0; i < TILE; i++) acc[g][i] += a * k[i].a;
                for (int i = 0; i < TILE; i++) acc[g][i] += b * k[i].b;
            }
        };
        int64_t d = 0;
        for (; d + 2 * W <= pairs.dim; d += 2 * W) add(d, d);
        if (d < pairs.dim) add(d, pairs.dim - 2 * W);
        for (int g = 0; g < N; g++) parts[g][s / TILE] = gather<TILE, W>(acc[g]);
    }
    for (int g = 0; g < N; g++) logits[g] = gather<W / TILE, W / TILE>(parts[g]);
}

// Add the values of n slots, weighed for N query heads, to their outputs: M pairs of the head dim. A hidden
// slot is not read: what it holds, NaN perhaps, is none of this step's business.
template <class X, int N, int M, bool IN_PLACE>
inline void mix(const float *p, int64_t slots, const int32_t *shown, Rows<typename X::T> values, int64_t n, Pairs pairs,
                int64_t first, float *out) {
    const int64_t ahead = rows_ahead<X>(pairs.dim);
    int64_t begin[M];
    for (int m = 0; m < M; m++) begin[m] = pairs.begin(first + m);
    Pair acc[N][M];
    for (int g = 0; g < N; g++)
        for (int m = 0; m < M; m++) acc[g][m] = Float32::widen(out + g * pairs.floats() + 2 * (first + m) * W);
    for (int64_t s = 0; s < n; s++) {
        if (!shown[s]) continue;
        const typename X::T *value = values.at(s);
        for (int m = 0; m < M; m++) fetch(values.at(s + ahead) + begin[m], 2 * W);
        Pair v[M];
        for (int m = 0; m < M; m++)
            v[m] = IN_PLACE ? X::widen(value + begin[m]) : widen<X>(value, pairs.dim);
        for (int g = 0; g < N; g++) {
            const Floats weight = all(p[g * slots + s]);
            for (int m = 0; m < M; m++) {
                acc[g][m].a += weight * v[m].a;
                acc[g][m].b += weight * v[m].b;
            }
        }
    }
    for (int g = 0; g < N; g++)
        for (int m = 0; m < M; m++) Float32::narrow(acc[g][m], out + g * pairs.floats() + 2 * (first + m) * W);
}

// Call with a compile-time number of query heads, GROUP at a time.
template <class Call>
inline void by_group(int64_t group, const Call &call) {
    int64_t g = 0;
    for (; g + GROUP <= group; g += GROUP) call(g, std::integral_constant<int, GROUP>());
    if (group - g == 3) call(g, std::integral_constant<int, 3>());
    if (group - g == 2) call(g, std::integral_constant<int, 2>());
    if (group - g == 1) call(g, std::integral_constant<int, 1>());
}

// The attention of the query heads of one row that share a KV head.
template <class X>
class Head {
    typedef typename X::T T;
    const Attend &a;
    const Layout at;
    const int64_t row, head, now;
    const int32_t *positions;
    float *query, *logits, *tempered, *out, *scale;
    int32_t *shown;
    int64_t visible = 0;  // slots that hold no later token than the query's, a sliding window aside

   public:
    Head(const Attend &a, int64_t index, float *scratch)
        : a(a), at(a), row(index / a.kv_heads), head(index % a.kv_heads), now(a.now[row * a.now_row]),
          positions(a.positions + row * a.position_row + head * a.position_head), query(scratch + at.query),
          logits(scratch + at.logits), tempered(scratch + at.tempered), out(scratch + at.out),
          scale(scratch + at.scale), shown((int32_t *)(scratch + at.shown)) {}

    void run() {
        std::memset(out, 0, a.group * at.value_dim.floats() * sizeof *out);
        if (now >= 0) {
            read_query();
            score();
            for (int64_t g = 0; g < a.group; g++) soften(g);
            weigh_values();
        }
        write_out();
        if (a.kind != NOTHING) report(now < 0 ? 0.0f : weight());
    }

   private:
    void read_query() {
        const T *from = (const T *)a.query + row * a.query_row + head * a.group * a.query_head;
        for (int64_t g = 0; g < a.group; g++)
            for (int64_t i = 0; i < at.dim.n; i++) {
                const int64_t begin = at.dim.begin(i);
                const Pair q = widen<X>(from + g * a.query_head + begin, at.dim.elements(), 2 * i * W - begin);
                Float32::narrow({q.a * (float)a.scaling, q.b * (float)a.scaling},
                                query + g * at.dim.floats() + 2 * i * W);
            }
    }

    Rows<T> keys() const {
        return {(const T *)a.keys + row * a.key_row + head * a.key_head, a.key_slot};
    }

    Rows<T> values() const {
        return {(const T *)a.values + row * a.value_row + head * a.value_head, a.value_slot};
    }

    Ints positions_at(int64_t s) const {
        if (s + W <= a.slots) return load<Ints>(positions + s);
        int32_t part[W];
        for (int i = 0; i < W; i++) part[i] = s + i < a.slots ? positions[s + i] : -1;
        return load<Ints>(part);
    }

    // Logits of all blocks of slots of which the query sees any.
    void score() {
        const Rows<T> keys = this->keys(), values = this->values();
        const int64_t before = a.window && now >= a.window ? now - a.window : -1;
        Ints count = {};
        for (int64_t s = 0; s < a.slots; s += W) {
            const Ints position = positions_at(s), past = (position >= 0) & (position <= (int32_t)now);
            const Ints show = past & (position > (int32_t)before);
            count -= past;
            store(shown + s, show);
            if (!any(show)) continue;
            const int64_t ahead = s + rows_ahead<X>(a.dim);
            const Rows<T> block = keys.from(s);
            const Rows<T> later = ahead < a.slots ? keys.from(ahead) : values.from(ahead - a.slots);
            by_group(a.group, [&](int64_t g, auto n) {
                Floats found[n.value];
                const float *q = query + g * at.dim.floats();
                if (at.dim.in_place())
                    dots<X, n.value, true>(q, at.dim, block, a.slots - s, later, found);
                else
                    dots<X, n.value, false>(q, at.dim, block, a.slots - s, later, found);
                for (int i = 0; i < n.value; i++) store(logits + (g + i) * at.slots + s, found[i]);
            });
        }
        visible = sum(count);
    }

    // Logits of a query head become e^(logit - largest), 0 where hidden; their scale makes them probabilities.
    void soften(int64_t g) {
        float *x = logits + g * at.slots, *t = tempered + g * at.slots;
        Floats most = all(-INFINITY), total = {}, total_tempered = {};
        for (int64_t s = 0; s < a.slots; s += W) {
            Floats logit = load<Floats>(x + s);
            if (a.softcap != 0.0) {
                logit = tanh(logit / (float)a.softcap) * (float)a.softcap;
                store(x + s, logit);
            }
            most = select(load<Ints>(shown + s) & (logit > most), logit, most);
        }
        const float peak = largest(most), sink = a.sinks ? a.sinks[head * a.group + g] : -INFINITY;
        const float top = sink > peak ? sink : peak;
        const float gain = a.gains ? a.gains[row] : (float)a.gain;
        for (int64_t s = 0; s < a.slots; s += W) {
            const Floats logit = load<Floats>(x + s);
            const Ints show = load<Ints>(shown + s);
            const Floats e = select(show, exp(logit - top), Floats{});
            total += e;
            store(x + s, e);
            if (!a.has_gain) continue;
            const Floats outside = select(past_at(s), all(std::pow(0.0f, gain)), Floats{});  // p is 0 there
            const Floats power = select(show, exp((logit - peak) * gain), outside);
            total_tempered += power;
            store(t + s, power);
        }
        const float whole = sum(total) + (sink == -INFINITY ? 0.0f : std::exp(sink - top));
        scale[g] = whole == 0.0f ? 0.0f : 1.0f / whole;  // 0: the query sees nothing
        const float whole_tempered = sum(total_tempered);
        scale[a.group + g] = whole_tempered == 0.0f ? 0.0f : 1.0f / whole_tempered;
    }

    Ints past_at(int64_t s) const {
        const Ints position = positions_at(s);
        return (position >= 0) & (position <= (int32_t)now);
    }

    void weigh_values() {
        for (int64_t s = 0; s < a.slots; s += SPAN) {
            const Rows<T> block = values().from(s);
            const int64_t n = a.slots - s < SPAN ? a.slots - s : SPAN;
            by_group(a.group, [&](int64_t g, auto heads) {
                const auto add = [&](int64_t first, auto pairs, auto in_place) {
                    mix<X, heads.value, pairs.value, in_place.value>(logits + g * at.slots + s, at.slots, shown + s,
                                                                     block, n, at.value_dim, first,
                                                                     out + g * at.value_dim.floats());
                };
                constexpr int M = TILE / 2;
                int64_t i = 0;
                if (!at.value_dim.in_place()) return add(0, std::integral_constant<int, 1>(), std::false_type());
                for (; i + M <= at.value_dim.n; i += M) add(i, std::integral_constant<int, M>(), std::true_type());
                for (; i < at.value_dim.n; i++) add(i, std::integral_constant<int, 1>(), std::true_type());
            });
        }
    }

    void write_out() {
        const Pairs pairs = at.value_dim;
        for (int64_t g = 0; g < a.group; g++) {
            T *to = (T *)a.out + ((row * a.kv_heads + head) * a.group + g) * a.value_dim;
            const float factor = now < 0 ? 0.0f : scale[g];
            for (int64_t i = 0; i < pairs.n; i++) {
                const Pair x = Float32::widen(out + g * pairs.floats() + 2 * i * W);
                narrow<X>({x.a * factor, x.b * factor}, to + pairs.begin(i), pairs.elements());
            }
        }
    }

    // What this row counts; 0 if not at all.
    float weight() const {
        const bool counts = a.counted ? a.counted[row] > 0 : a.counts != 0;
        const int64_t ago = newest() - now;
        return !counts ? 0.0f : ago <= 0 ? 1.0f : (float)std::pow(a.decay, (double)ago);
    }

    int64_t newest() const { return a.newest ? a.newest[row] : a.last; }

    void report(float weight) {
        float *mass = a.mass + (row * a.kv_heads + head) * a.slots;
        float *extra = a.extra + (row * a.kv_heads + head) * a.slots;
        if (weight == 0.0f) {
            std::memset(mass, 0, a.slots * sizeof *mass);
            if (a.kind != MASS) std::memset(extra, 0, a.slots * sizeof *extra);
            return;
        }
        average(mass);
        if (a.kind == MASS_AND_LAST)
            for (int64_t s = 0; s < a.slots; s++) extra[s] = newest() == now ? mass[s] : 0.0f;
        if (a.kind == MASS_AND_LOW) {
            const float n = (float)(a.live ? visible : now + 1), theta = (float)a.theta;
            for (int64_t s = 0; s < a.slots; s++)
                extra[s] = mass[s] * n * theta < 1.0f && positions[s] >= 0 && positions[s] <= now ? 1.0f : 0.0f;
        }
        if (weight != 1.0f)
            for (int64_t s = 0; s < a.slots; s++) mass[s] *= weight;
    }

    // The mean of the query heads' probabilities, tempered if there is a gain.
    void average(float *mass) const {
        const float *p = a.has_gain ? tempered : logits, *factor = scale + (a.has_gain ? a.group : 0);
        for (int64_t s = 0; s < a.slots; s += W) {
            Floats total = {};
            for (int64_t g = 0; g < a.group; g++) total += load<Floats>(p + g * at.slots + s) * factor[g];
            total = total / (float)a.group;
            if (s + W <= a.slots)
                store(mass + s, total);
            else
                std::memcpy(mass + s, &total, (a.slots - s) * sizeof *mass);
        }
    }
};

template <class X>
int64_t attend_as(const Attend &a) {
    const int64_t bytes = a.rows * a.kv_heads * a.slots * (a.dim + a.value_dim) * (int64_t)sizeof(typename X::T);
    const auto work = [&](int64_t i, float *scratch) { Head<X>(a, i, scratch).run(); };
    return for_each(a.rows * a.kv_heads, bytes, a.threads, Layout(a).size, work) ? 0 : -1;
}

}  // namespace

extern "C" int64_t kvkeep_attend(const Attend *a) {
    switch (a->type) {
        case 0: return attend_as<Float32>(*a);
        case 1: return attend_as<BFloat16>(*a);
        default: return attend_as<Float16>(*a);
    }
}

// ---- slots ----------------------------------------------------------------------------------------------------------

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

// Put each row's token into the slot with the smallest position of every head (empty ones carry -1), the first of
// equals, and say which it was.
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
    const int64_t *seen;  // tokens of each row
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

// A float as a whole number of the same order: NaN, which has none, as the lowest, and one zero.
inline int32_t ordered(float x) {
    const float number = (x != x ? -INFINITY : x) + 0.0f;
    int32_t u;
    std::memcpy(&u, &number, sizeof u);
    return u ^ ((u >> 31) & INT32_MAX);
}

}  // namespace

// Empty the slots that no later query can see.
extern "C" int64_t kvkeep_expire(const Slots *s) {
    return for_each_head(s, 0, [=](int32_t *positions, int64_t row, int64_t, float *) {
        const int32_t last = (int32_t)(s->seen[row * s->seen_row] - s->window);
        for (int64_t i = 0; i < s->slots; i++) positions[i] = positions[i] <= last ? -1 : positions[i];
    }) ? 0 : -1;
}

// How many heads hold more than their limit.
extern "C" int64_t kvkeep_count_over(const Slots *s) {
    int64_t over = 0;
    const bool done = for_each_head(s, 0, [=, &over](int32_t *positions, int64_t row, int64_t head, float *) {
        if (is_over(s, positions, row, head)) __atomic_fetch_add(&over, 1, __ATOMIC_RELAXED);
    });
    return done ? over : -1;
}

// Empty the occupied slot with the smallest (score, position) in every head that holds more than its limit. The first
// `sinks` and the newest `recent` positions have an infinite score.
extern "C" int64_t kvkeep_evict(const Slots *s) {
    return for_each_head(s, s->slots, [=](int32_t *positions, int64_t row, int64_t head, float *scratch) {
        if (!is_over(s, positions, row, head)) return;
        const float *scores = s->scores + row * s->score_row + head * s->score_head;
        const int64_t newest = s->recents ? s->recents[row * s->recents_row] : s->recent;
        const int32_t recent = (int32_t)(s->seen[row * s->seen_row] - newest), sinks = (int32_t)s->sinks;
        int32_t *order = (int32_t *)scratch, lowest = INT32_MAX, oldest = INT32_MAX;
        for (int64_t i = 0; i < s->slots; i++) {
            const bool safe = positions[i] >= recent || positions[i] < sinks;
            const int32_t score = ordered(safe ? INFINITY : scores[i]);
            order[i] = positions[i] < 0 ? INT32_MAX : score;
            lowest = order[i] < lowest ? order[i] : lowest;
        }
        for (int64_t i = 0; i < s->slots; i++)
            oldest = order[i] == lowest && positions[i] >= 0 && positions[i] < oldest ? positions[i] : oldest;
        for (int64_t i = 0; i < s->slots; i++)
            if (order[i] == lowest && positions[i] == oldest) {
                positions[i] = -1;
                return;
            }
    }) ? 0 : -1;
}

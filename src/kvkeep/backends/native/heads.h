// Work on the heads of all rows, on torch's threads.
//
// The unit of work is one head of one row. One thread does it from beginning to end in a fixed order, so results do not
// depend on the number of threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <thread>

#ifdef _OPENMP
#include <omp.h>
#include <pthread.h>
#endif

// Where the slots of each head lie in a pool that all heads of a row share.
extern "C" struct Ranges {
    const int64_t *starts, *sizes;  // of keys and values; null where all heads have theirs side by side
    int64_t step;                   // from row to row, in both
    int64_t whole;                  // whether positions and a policy's sums lie in the pool as well

    // Where a head's keys and values begin in its row, and where its positions and sums do, beyond the head's stride.
    int64_t start(int64_t row, int64_t head) const { return starts ? starts[row * step + head] : 0; }
    int64_t inner(int64_t row, int64_t head) const { return whole ? start(row, head) : 0; }

    // How many slots a head has, and how many positions. `width`: those of every head side by side.
    int64_t size(int64_t row, int64_t head, int64_t width) const { return sizes ? sizes[row * step + head] : width; }
    int64_t places(int64_t row, int64_t head, int64_t width) const { return whole ? size(row, head, width) : width; }
};

namespace {

#ifdef _OPENMP
// A process that was forked has none of its parent's threads, and OpenMP would wait for them forever.
bool is_forked = false;
const int noticed = pthread_atfork(nullptr, nullptr, [] { is_forked = true; });
#else
constexpr bool is_forked = true;  // has no threads
#endif

constexpr int64_t WORTH_A_THREAD = 1 << 17;  // bytes read in the time that it takes to wake other threads
constexpr int64_t WORTH_A_HELPER = 1 << 14;  // the same for threads that look for work

inline int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Memory for floats, aligned to a cache line; null if there is none left.
class Scratch {
    static constexpr std::align_val_t LINE{64};
    void *memory;

   public:
    explicit Scratch(int64_t floats) : memory(::operator new(floats * sizeof(float), LINE, std::nothrow)) {}
    ~Scratch() { ::operator delete(memory, LINE); }
    Scratch(const Scratch &) = delete;
    float *get() const { return (float *)memory; }
};

// Threads that work on the loops of one step, one loop after the other, without being started anew for each.
//
// A loop ends when all of its work is done, and not when all threads have come: on a busy machine a thread may get no
// processor for longer than a step takes, and the others do its work meanwhile.
class Team {
    static constexpr int SPINS = 2000;  // looks for work before a thread gives its processor away, some microseconds

    struct Loop {
        std::atomic<int64_t> next{0}, done{0};
        int64_t n, threads;  // fewer threads: shorter runs of neighbours; 0: one at a time
        void (*call)(const void *work, int64_t i, int64_t thread);
        const void *work;

        // Do what nobody has begun. The work is alive as long as some of it is not done.
        void take(int64_t thread) {
            for (int64_t from = next.load(std::memory_order_relaxed), some; from < n;) {
                some = threads ? std::max<int64_t>((n - from) / (2 * threads), 1) : 1;
                if (!next.compare_exchange_weak(from, from + some, std::memory_order_relaxed)) continue;
                for (int64_t i = from; i < from + some; i++) call(work, i, thread);
                done.fetch_add(some, std::memory_order_release);
                from = next.load(std::memory_order_relaxed);
            }
        }
    };

    const std::unique_ptr<Loop[]> loops;
    const int64_t most;
    std::atomic<int64_t> begun{0};  // below 0: the step has ended

    // Wait a moment, and longer after many of them.
    static void pause(int &spins) {
        if (++spins > SPINS) return std::this_thread::yield();
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#endif
    }

   public:
    const int64_t threads;

    // For so many loops; more are run by the leader alone.
    Team(int64_t most, int64_t threads)
        : loops(new (std::nothrow) Loop[most]), most(loops ? most : 0), threads(threads) {}

    // What all threads but the leader do until the step ends.
    void help(int64_t thread) {
        int spins = 0;
        for (int64_t known = 0, now; (now = begun.load(std::memory_order_acquire)) >= 0;) {
            if (now == known) {
                pause(spins);
                continue;
            }
            known = now, spins = 0;
            loops[now - 1].take(thread);
        }
    }

    // Call work(i, thread) for every i below n; false if there is no room for another loop.
    template <class Work>
    bool run(int64_t n, bool in_runs, const Work &work) {
        const int64_t number = begun.load(std::memory_order_relaxed);
        if (number >= most) return false;
        Loop &loop = loops[number];
        loop.n = n, loop.threads = in_runs ? threads : 0, loop.work = &work;
        loop.call = [](const void *work, int64_t i, int64_t thread) { (*(const Work *)work)(i, thread); };
        begun.store(number + 1, std::memory_order_release);
        loop.take(0);
        for (int spins = 0; loop.done.load(std::memory_order_acquire) < n;) pause(spins);
        return true;
    }

    void end() { begun.store(-1, std::memory_order_release); }
};

thread_local Team *team = nullptr;  // of the step that this thread leads

// Call work(i, scratch) for every i below n, in runs of neighbours or one at a time; see below.
template <bool RUNS, class Work>
bool for_each_of(int64_t n, int64_t bytes, int64_t threads, int64_t floats, const Work &work) {
    if (team) threads = team->threads;
    if (bytes < (team ? WORTH_A_HELPER : WORTH_A_THREAD) || n < 2 || is_forked) threads = 1;
    const int64_t each = up(floats, 32);
    const Scratch scratch(each * threads);
    if (!scratch.get()) return false;
    if (threads > 1 && team) {
        const auto of_thread = [&](int64_t i, int64_t thread) { work(i, scratch.get() + thread * each); };
        if (team->run(n, RUNS, of_thread)) return true;
        threads = 1;
    }
#ifdef _OPENMP
    if (threads > 1 && RUNS) {
#pragma omp parallel for schedule(guided) num_threads(threads)
        for (int64_t i = 0; i < n; i++) work(i, scratch.get() + omp_get_thread_num() * each);
        return true;
    }
    if (threads > 1) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
        for (int64_t i = 0; i < n; i++) work(i, scratch.get() + omp_get_thread_num() * each);
        return true;
    }
#endif
    for (int64_t i = 0; i < n; i++) work(i, scratch.get());
    return true;
}

// Call work() with a team of so many threads for all of its loops, of which there are at most so many.
template <class Work>
void as_team(int64_t most_loops, int64_t threads, const Work &work) {
#ifdef _OPENMP
    if (threads > 1 && !is_forked) {
        Team all(most_loops, threads);
#pragma omp parallel num_threads(threads)
        if (omp_get_thread_num()) {
            all.help(omp_get_thread_num());
        } else {
            team = &all;
            work();
            team = nullptr;
            all.end();
        }
        return;
    }
#endif
    work();
}

// Call work(i, scratch) for every i below n, where each takes its own time. Returns false if there is no memory for so
// many scratch floats.
template <class Work>
bool for_each(int64_t n, int64_t bytes, int64_t threads, int64_t floats, const Work &work) {
    return for_each_of<false>(n, bytes, threads, floats, work);
}

// The same where all take the same time and read on in memory, so a thread gets many in a row: half of what is left for
// each thread, then half of the rest. It reads in one stream as long as it can.
template <class Work>
bool for_each_in_order(int64_t n, int64_t bytes, int64_t threads, int64_t floats, const Work &work) {
    return for_each_of<true>(n, bytes, threads, floats, work);
}

}  // namespace

// Work on the heads of all rows, on torch's threads.
//
// The unit of work is one head of one row. One thread does it from beginning to end in a fixed order, so results do not
// depend on the number of threads.

#pragma once

#include <cstdint>
#include <new>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int64_t WORTH_A_THREAD = 1 << 17;  // bytes read in the time that it takes to wake other threads

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

// Call work(i, scratch) for every i below n, in runs of neighbours or one at a time; see below.
template <bool RUNS, class Work>
bool for_each_of(int64_t n, int64_t bytes, int64_t threads, int64_t floats, const Work &work) {
    if (bytes < WORTH_A_THREAD || n < 2) threads = 1;
    const int64_t each = up(floats, 32);
    const Scratch scratch(each * threads);
    if (!scratch.get()) return false;
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

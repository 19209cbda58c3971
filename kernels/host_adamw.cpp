// AdamW and the sum of squares on the CPU, for host_adamw.py. C ABI, no library, one pass over memory.
//
// Every operation is IEEE fp32 in the order of reference.py (build with -ffp-contract=off and without -ffast-math), so
// results are bit-identical to it. A call takes one range of `record` elements after another from the shared counter
// `next` until none is left: any number of threads may work on one job, and who takes what changes no number.

#include <cstdint>
#include <cstring>

namespace {

inline float as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline uint32_t as_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

inline float up(float x) { return x; }
inline float up(uint16_t bf16) { return as_float(uint32_t(bf16) << 16); }

// A weight kept as fp32.
struct Whole {
    float *w;
    float load(int64_t i) const { return w[i]; }
    void store(int64_t i, float x) const { w[i] = x; }
};

// A weight kept as bits(master) = (hi << 16) + lo, with hi the bf16 rounded half up in magnitude.
struct Split {
    uint16_t *hi;
    int16_t *lo;
    float load(int64_t i) const { return as_float((uint32_t(hi[i]) << 16) + uint32_t(int32_t(lo[i]))); }
    void store(int64_t i, float x) const {
        uint32_t bits = as_bits(x), high = (bits + 0x8000u) >> 16;
        hi[i] = uint16_t(high);
        lo[i] = int16_t(uint16_t(bits));  // bits - (high << 16) lies in [-0x8000, 0x7fff]: its low half is that of bits
    }
};

struct Scalars {
    float clip, decay, beta1, rest1, beta2, rest2, step_size, inv_sqrt_bias2, eps;  // rest = 1 - beta
};

// What host_adamw.py's _Job mirrors, field by field.
struct Job {
    void *w;
    int16_t *lo;  // null: w is fp32
    float *m, *v;
    const void *grad;
    int64_t grad_is_bf16, n, n_decay, record;
    Scalars s;
};

template <class Weight, class Grad>
inline void update(Weight w, float *m, float *v, const Grad *grad, Scalars s, float decay, int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
        float g = up(grad[i]) * s.clip;
        float master = w.load(i) * decay;
        float mi = s.beta1 * m[i] + s.rest1 * g;
        float vi = s.beta2 * v[i] + s.rest2 * (g * g);
        float denom = __builtin_sqrtf(vi) * s.inv_sqrt_bias2 + s.eps;
        m[i] = mi;
        v[i] = vi;
        w.store(i, master - (s.step_size * mi) / denom);
    }
}

inline int64_t take(int64_t *next, int64_t record) { return __atomic_fetch_add(next, 1, __ATOMIC_RELAXED) * record; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : min(x, high); }

template <class Weight, class Grad>
void update_records(Weight w, const Grad *grad, const Job &job, int64_t *next) {
    for (int64_t begin; (begin = take(next, job.record)) < job.n;) {
        int64_t end = min(begin + job.record, job.n), turn = clamp(job.n_decay, begin, end);
        update(w, job.m, job.v, grad, job.s, job.s.decay, begin, turn);
        update(w, job.m, job.v, grad, job.s, 1.0f, turn, end);  // times 1 is exact
    }
}

template <class Weight>
void update_weight(Weight w, const Job &job, int64_t *next) {
    if (job.grad_is_bf16) update_records(w, static_cast<const uint16_t *>(job.grad), job, next);
    else update_records(w, static_cast<const float *>(job.grad), job, next);
}

// Sum of squares of up to ROWS * LANES elements: each lane adds its rows in order, then the lanes are halved.
constexpr int64_t ROWS = 64, LANES = 1024, BLOCK = ROWS * LANES;

template <class Grad>
float block_sum(const Grad *x, int64_t n) {
    float lanes[LANES] = {};
    for (int64_t row = 0; row < n; row += LANES) {
        int64_t width = min(LANES, n - row);
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) lanes[i] += up(x[row + i]) * up(x[row + i]);
    }
    for (int64_t half = LANES / 2; half > 0; half /= 2)
#pragma omp simd
        for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
}

template <class Grad>
void block_sums(const Grad *x, int64_t n, double *sums, int64_t *next) {
    for (int64_t begin; (begin = take(next, BLOCK)) < n;) sums[begin / BLOCK] = block_sum(x + begin, min(BLOCK, n - begin));
}

}  // namespace

extern "C" {

void trireme_adamw(const Job *job, int64_t *next) {
    if (job->lo) update_weight(Split{static_cast<uint16_t *>(job->w), job->lo}, *job, next);
    else update_weight(Whole{static_cast<float *>(job->w)}, *job, next);
}

// sums[b] = the sum of squares of block b of x, which has n elements.
void trireme_block_sums(const void *x, int64_t is_bf16, int64_t n, double *sums, int64_t *next) {
    if (is_bf16) block_sums(static_cast<const uint16_t *>(x), n, sums, next);
    else block_sums(static_cast<const float *>(x), n, sums, next);
}

// The yardstick for benchmarks: the cheapest pass over memory in place.
void trireme_scale(float *x, int64_t n, float factor, int64_t record, int64_t *next) {
    for (int64_t begin; (begin = take(next, record)) < n;) {
        int64_t end = min(begin + record, n);
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) x[i] *= factor;
    }
}
}

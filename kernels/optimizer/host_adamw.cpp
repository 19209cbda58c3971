// AdamW on the CPU, for host_adamw.py. C ABI, own threads, one pass over memory.
//
// Every operation is IEEE fp32 in the order of reference.py (build with -ffp-contract=off and without -ffast-math), so
// results are bit-identical to it. A call takes one range of `record` elements after another from the shared counter
// `next` until none is left: any number of threads may work on one job, and who takes what changes no number.

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace {

inline float as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline uint32_t as_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

// Those of one NaN for every NaN: those of others may round to infinity, or beyond it to zero.
inline uint32_t one_nan(float x) { return x == x ? as_bits(x) : 0x7FC00000u; }

inline float up(float x) { return x; }
inline float up(uint16_t bf16) { return as_float(uint32_t(bf16) << 16); }

constexpr int64_t BLOCK = 256;   // elements: what shares a floor among 8-bit moments, and what is fetched at a time
constexpr int64_t AHEAD = 1024;  // elements between what is fetched and what is updated

// Asks for BLOCK elements from p on. It may reach beyond the array: a prefetch never faults.
template <class T>
inline void fetch(const T *p) {
    for (int64_t i = 0; i < BLOCK; i += 64 / sizeof(T)) __builtin_prefetch(p + i, 1);
}

// A weight kept as fp32.
struct Whole {
    float *w;
    Whole operator+(int64_t i) const { return {w + i}; }
    void ahead() const { fetch(w + AHEAD); }
    float load(int64_t i) const { return w[i]; }
    void store(int64_t i, float x) const { w[i] = x; }
};

// A weight kept as bits(master) = (hi << 16) + lo, with hi the bf16 rounded half up in magnitude.
struct Split {
    uint16_t *hi;
    int16_t *lo;
    Split operator+(int64_t i) const { return {hi + i, lo + i}; }
    void ahead() const { fetch(hi + AHEAD), fetch(lo + AHEAD); }
    float load(int64_t i) const { return as_float((uint32_t(hi[i]) << 16) + uint32_t(int32_t(lo[i]))); }
    void store(int64_t i, float x) const {
        uint32_t bits = one_nan(x), high = (bits + 0x8000u) >> 16;
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
    void *m, *v;  // fp32, bf16 or 8-bit codes, by moment_bytes
    int16_t *m_floor, *v_floor;
    const void *grad;
    int64_t moment_bytes, grad_is_bf16, n, n_decay, record;
    int64_t part;  // what is stored: ALL, WEIGHTS or MOMENTS; the last two are for fp32 moments
    Scalars s;
    uint32_t noise;  // of element 0: the noise key + its index in the unit
};

// Parts of an update. WEIGHTS, then MOMENTS, is bitwise identical to ALL: moments are computed twice from equal inputs.
enum Part { ALL, WEIGHTS, MOMENTS };

// The update of n elements, the first n_decay of them with weight decay.
template <Part part = ALL, class Weight, class Grad>
inline void update(Weight w, float *m, float *v, const Grad *grad, const Scalars s, int64_t n, int64_t n_decay) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        float g = up(grad[i]) * s.clip;
        float mi = s.beta1 * m[i] + s.rest1 * g;
        float vi = s.beta2 * v[i] + s.rest2 * (g * g);
        if constexpr (part != WEIGHTS) m[i] = mi, v[i] = vi;
        if constexpr (part != MOMENTS) {
            float master = w.load(i) * (i < n_decay ? s.decay : 1.0f);  // times 1 is exact
            float denom = __builtin_sqrtf(vi) * s.inv_sqrt_bias2 + s.eps;
            w.store(i, master - (s.step_size * mi) / denom);
        }
    }
}

// ---- moments of 16 and 8 bits: the formats of moments.py, decoded into and encoded from buffers of BLOCK elements

inline uint32_t hash32(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

struct Moments16 {
    uint16_t *m, *v;
    explicit Moments16(const Job &job) : m(static_cast<uint16_t *>(job.m)), v(static_cast<uint16_t *>(job.v)) {}

    void load(int64_t at, int64_t n, float *mf, float *vf) const {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) mf[i] = up(m[at + i]), vf[i] = up(v[at + i]);
    }
    void store(int64_t at, int64_t n, const float *mf, const float *vf, uint32_t noise) const {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            uint32_t drawn = hash32(noise + uint32_t(i));
            m[at + i] = uint16_t((one_nan(mf[i]) + (drawn & 0xFFFF)) >> 16);
            v[at + i] = uint16_t((one_nan(vf[i]) + (drawn >> 16)) >> 16);
        }
    }
};

struct Moments8 {
    uint8_t *m, *v;
    int16_t *m_floor, *v_floor;
    explicit Moments8(const Job &job)
        : m(static_cast<uint8_t *>(job.m)), v(static_cast<uint8_t *>(job.v)), m_floor(job.m_floor),
          v_floor(job.v_floor) {}

    static float decode(int32_t code, int32_t floor) { return as_float(code ? uint32_t(code + floor) << 20 : 0); }
    static int32_t floor_of(uint32_t top, int32_t codes) {  // + 1: the largest may be rounded up
        int32_t floor = int32_t(top >> 20) + 1 - codes;
        return floor > 0 ? floor : 0;
    }
    static int32_t encode(uint32_t bits, uint32_t noise, int32_t floor, int32_t least) {
        int32_t code = int32_t((bits + (noise << 4)) >> 20) - floor;
        return code > least ? code : least;
    }

    void load(int64_t at, int64_t n, float *mf, float *vf) const {
        int32_t mb = m_floor[at / BLOCK], vb = v_floor[at / BLOCK];
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            uint32_t code = m[at + i];
            mf[i] = as_float(as_bits(decode(code & 127, mb)) | (code >> 7) << 31);
            vf[i] = decode(v[at + i], vb);
        }
    }
    void store(int64_t at, int64_t n, const float *mf, const float *vf, uint32_t noise) const {
        uint32_t m_top = 0, v_top = 0;
#pragma omp simd reduction(max : m_top, v_top)
        for (int64_t i = 0; i < n; ++i) {
            uint32_t mi = one_nan(mf[i]) & 0x7FFFFFFFu, vi = one_nan(vf[i]) & 0x7FFFFFFFu;
            m_top = mi > m_top ? mi : m_top;
            v_top = vi > v_top ? vi : v_top;
        }
        int32_t mb = floor_of(m_top, 127), vb = floor_of(v_top, 255);
        m_floor[at / BLOCK] = int16_t(mb);
        v_floor[at / BLOCK] = int16_t(vb);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            uint32_t drawn = hash32(noise + uint32_t(i)), mi = one_nan(mf[i]), vi = one_nan(vf[i]) & 0x7FFFFFFFu;
            m[at + i] = uint8_t(encode(mi & 0x7FFFFFFFu, drawn & 0xFFFF, mb, 0) | (mi >> 24 & 0x80));
            v[at + i] = uint8_t(encode(vi, drawn >> 16, vb, vi > 0));
        }
    }
};

// ---- one job

inline int64_t take(int64_t *next, int64_t record) { return __atomic_fetch_add(next, 1, __ATOMIC_RELAXED) * record; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

// Five streams are more than a core's own prefetcher keeps in flight: asked for ahead, an update is an eighth faster.
// The three of MOMENTS are not too many, and are slower so.
template <Part part, class Weight, class Grad>
void update_part(Weight w, const Grad *grad, const Job &job, int64_t begin, int64_t end) {
    float *m = static_cast<float *>(job.m), *v = static_cast<float *>(job.v);
    for (int64_t at = begin, n; at < end; at += n) {
        n = part == MOMENTS ? end - at : min(BLOCK, end - at);
        if constexpr (part != MOMENTS) {
            (w + at).ahead();
            fetch(m + at + AHEAD), fetch(v + at + AHEAD), fetch(grad + at + AHEAD);
        }
        update<part>(w + at, m + at, v + at, grad + at, job.s, n, job.n_decay - at);
    }
}

template <class Weight, class Grad>
void update_range(Weight w, const Grad *grad, const Job &job, int64_t begin, int64_t end) {
    if (job.part == WEIGHTS) update_part<WEIGHTS>(w, grad, job, begin, end);
    else if (job.part == MOMENTS) update_part<MOMENTS>(w, grad, job, begin, end);
    else update_part<ALL>(w, grad, job, begin, end);
}

template <class Moments, class Weight, class Grad>
void update_blocks(Weight w, const Grad *grad, const Job &job, int64_t begin, int64_t end) {
    const Moments moments(job);
    alignas(64) float m[BLOCK], v[BLOCK];
    for (int64_t at = begin; at < end; at += BLOCK) {
        int64_t n = min(BLOCK, end - at);
        moments.load(at, n, m, v);
        update(w + at, m, v, grad + at, job.s, n, job.n_decay - at);
        moments.store(at, n, m, v, job.noise + uint32_t(at));
    }
}

template <class Weight, class Grad>
void update_records(Weight w, const Grad *grad, const Job &job, int64_t *next) {
    for (int64_t begin; (begin = take(next, job.record)) < job.n;) {
        int64_t end = min(begin + job.record, job.n);
        if (job.moment_bytes == 4) update_range(w, grad, job, begin, end);
        else if (job.moment_bytes == 2) update_blocks<Moments16>(w, grad, job, begin, end);
        else update_blocks<Moments8>(w, grad, job, begin, end);
    }
}

template <class Weight>
void update_weight(Weight w, const Job &job, int64_t *next) {
    if (job.grad_is_bf16) update_records(w, static_cast<const uint16_t *>(job.grad), job, next);
    else update_records(w, static_cast<const float *>(job.grad), job, next);
}

// ---- threads

using Work = void(const void *job, int64_t *next);

// Threads that sleep until there is work, and the caller, all in one call of `work`. The interpreter sees one call: no
// thread of it is woken or waited for under the GIL, so a busy interpreter delays nothing.
class Team {
    std::mutex mutex;
    std::condition_variable wake, done;
    Work *work = nullptr;
    const void *job = nullptr;
    int64_t next = 0, turn = 0, busy = 0;
    bool closing = false;
    std::vector<std::thread> threads;

    void live() {
        for (int64_t seen = 0;;) {
            std::unique_lock<std::mutex> lock(mutex);
            wake.wait(lock, [&] { return closing || turn != seen; });
            if (closing) return;
            seen = turn;
            lock.unlock();
            work(job, &next);
            lock.lock();
            if (--busy == 0) done.notify_one();
        }
    }

  public:
    explicit Team(int64_t others) {
        try {
            while (int64_t(threads.size()) < others) threads.emplace_back([this] { live(); });
        } catch (const std::system_error &) {  // no more threads to be had: fewer do the same work
        }
    }
    void run(Work *what, const void *on) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            work = what, job = on, next = 0, busy = int64_t(threads.size());
            ++turn;
        }
        wake.notify_all();
        what(on, &next);
        std::unique_lock<std::mutex> lock(mutex);
        done.wait(lock, [&] { return busy == 0; });
    }
    ~Team() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            closing = true;
        }
        wake.notify_all();
        for (auto &thread : threads) thread.join();
    }
};

// Argument of trireme_list, as host_adamw.py's _List mirrors it.
struct List {
    Work *const *work;
    const void *const *job;
    int64_t *next;  // a counter for each, 0 at first
    int64_t count;
};

}  // namespace

extern "C" {

// The kernels take a job and the shared counter, which starts at 0. Any number of threads may be in one call's work.
void trireme_adamw(const void *job_, int64_t *next) {
    const Job &job = *static_cast<const Job *>(job_);
    if (job.lo) update_weight(Split{static_cast<uint16_t *>(job.w), job.lo}, job, next);
    else update_weight(Whole{static_cast<float *>(job.w)}, job, next);
}

// Several jobs in turn. A thread that finds nothing left of one goes on with the next: nobody waits between them.
void trireme_list(const void *job, int64_t *) {
    const List &list = *static_cast<const List *>(job);
    for (int64_t i = 0; i < list.count; ++i) list.work[i](list.job[i], list.next + i);
}

void *trireme_team_open(int64_t others) { return new Team(others); }
void trireme_team_run(void *team, Work *work, const void *job) { static_cast<Team *>(team)->run(work, job); }
void trireme_team_close(void *team) { delete static_cast<Team *>(team); }
}

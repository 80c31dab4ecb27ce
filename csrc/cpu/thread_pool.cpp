// One ticket word says which job is current and which part comes next; helpers and caller claim parts from it with a
// compare-and-swap, so a helper that wakes late finds nothing to do instead of a stale job.
#include "cpu/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/isa.h"

namespace hydra {
namespace {

using Clock = std::chrono::steady_clock;

// A helper stays awake this long after its last job: about the gap between two ops of one decode step.
constexpr auto kSpin = std::chrono::microseconds(40);
// After this much of it the waiting thread offers its core to others, for machines with more threads than cores.
constexpr auto kBusySpin = std::chrono::microseconds(8);

inline void pause() {
#if HYDRA_X86
  __builtin_ia32_pause();
#endif
}

// The processor that the calling thread runs on, or -1 where the system does not say.
inline int current_cpu() {
#ifdef __linux__
  return sched_getcpu();
#else
  return -1;
#endif
}

// Waits until done() or until the spin time is over; returns whether done() was seen. A thread that shares its
// processor with the one it waits for (`other_cpu`) does not spin: it would only delay it.
template <class Done>
bool spin_until(Done done, int other_cpu) {
  const auto start = Clock::now();
  for (;;) {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      pause();
    }
    const auto waited = Clock::now() - start;
    if (waited > kSpin || (other_cpu >= 0 && current_cpu() == other_cpu)) return done();
    if (waited > kBusySpin) sched_yield();
  }
}

// Ticket: job number (32 bits) | parts of the job (16) | next part to claim (16).
constexpr int kMaxParts = 0xffff;

uint32_t job_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }
int parts_of(uint64_t ticket) { return static_cast<int>(ticket >> 16 & 0xffff); }
int next_of(uint64_t ticket) { return static_cast<int>(ticket & 0xffff); }

class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 1; i < threads; ++i) helpers_.emplace_back([this] { help(); });
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_.store(true);
    }
    wake_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
  }

  void run(int parts, detail::PartFn fn, void* context) {
    fn_ = fn;
    context_ = context;
    error_ = nullptr;
    caller_cpu_.store(current_cpu(), std::memory_order_relaxed);
    unfinished_.store(parts, std::memory_order_relaxed);
    ticket_.store(static_cast<uint64_t>(++job_) << 32 | static_cast<uint64_t>(parts) << 16);
    if (sleepers_.load() > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    while (work_once()) {
    }
    wait_for_helpers();
    if (error_) std::rethrow_exception(error_);
  }

 private:
  // Claims and runs one part; false when none is left.
  bool work_once() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    do {
      if (next_of(ticket) >= parts_of(ticket)) return false;
    } while (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel));
    try {
      fn_(context_, next_of(ticket));
    } catch (...) {  // handed to the caller by run()
      std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
    if (unfinished_.fetch_sub(1) == 1 && caller_sleeps_.load()) {
      std::lock_guard<std::mutex> lock(mutex_);
      finished_.notify_one();
    }
    return true;
  }

  void wait_for_helpers() {
    const auto all_done = [this] { return unfinished_.load() == 0; };
    if (all_done() || spin_until(all_done, -1)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    caller_sleeps_.store(true);
    finished_.wait(lock, all_done);
    caller_sleeps_.store(false);
  }

  void help() {
    uint32_t seen = 0;
    for (;;) {
      const auto has_news = [&] { return job_of(ticket_.load()) != seen || stop_.load(); };
      if (!spin_until(has_news, caller_cpu_.load(std::memory_order_relaxed))) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, has_news);
        sleepers_.fetch_sub(1);
      }
      if (stop_.load()) return;
      seen = job_of(ticket_.load());
      while (work_once()) {
      }
    }
  }

  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int> unfinished_{0};
  std::atomic<bool> caller_sleeps_{false};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::atomic<int> caller_cpu_{-1};
  detail::PartFn fn_ = nullptr;
  void* context_ = nullptr;
  std::exception_ptr error_;
  uint32_t job_ = 0;
  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  std::vector<std::thread> helpers_;
};

thread_local int t_threads = 1;
thread_local std::unique_ptr<Pool> t_pool;

}  // namespace

int num_threads() { return t_threads; }

void set_num_threads(int n) {
  n = std::max(1, std::min(n, kMaxParts));
  if (n == t_threads) return;
  t_pool.reset();
  t_threads = n;
}

void detail::run_parts(int parts, PartFn fn, void* context) {
  if (parts <= 0) return;
  if (parts == 1 || t_threads == 1) {
    for (int part = 0; part < parts; ++part) fn(context, part);
    return;
  }
  if (parts > kMaxParts) std::terminate();  // callers cut work by thread count
  if (!t_pool) t_pool = std::make_unique<Pool>(t_threads);
  t_pool->run(parts, fn, context);
}

}  // namespace hydra

// The coroutines behind executor.h. One launch at a time; odd launches go through blocks and threads backwards, so that
// results which depend on an order differ between two calls.
#include "executor.h"

#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace host_cuda {
namespace {

// Small: the sanitizer clears its view of a whole stack at every change.
constexpr size_t kStackBytes = 32 << 10;
constexpr size_t kGuardBytes = 4096;
constexpr unsigned kWarp = 32;

enum class State { fresh, runnable, shuffling, at_barrier, left };

struct Thread {
  State state = State::fresh;
  uint32_t mask = 0, value = 0, partner = 0;  // of a shuffle
  struct Fiber* fiber = nullptr;
};

// A stack that works through threads that have not begun, one after the other, until one of them waits.
struct Fiber {
  ucontext_t context;
  char* memory;
  void* fake_stack = nullptr;

  Fiber();
  ~Fiber() {
    __asan_unpoison_memory_region(memory, kStackBytes);
    munmap(memory, kStackBytes);
  }
  Fiber(const Fiber&) = delete;
};

struct Read {
  const void* source;
  unsigned char value[16];
  uint8_t bytes;
};

struct Executor {
  std::mutex one_launch;
  bool backwards = false;
  dim3 thread, block, block_size, grid_size;
  const std::function<void()>* body = nullptr;
  std::vector<Thread> threads;
  size_t begun = 0;
  Thread* running = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Fiber*> idle;
  std::vector<Read> reads;
  ucontext_t scheduler;
  const void* scheduler_stack = nullptr;
  size_t scheduler_bytes = 0;
} exec;

template <class... Parts>
[[noreturn]] void break_rule(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

unsigned index_of(const Thread& thread) { return static_cast<unsigned>(&thread - exec.threads.data()); }

void enter(Thread& thread) {
  exec.running = &thread;
  const unsigned index = index_of(thread), in_plane = exec.block_size.x * exec.block_size.y;
  exec.thread = dim3(index % exec.block_size.x, index % in_plane / exec.block_size.x, index / in_plane);
}

// ---- changing places

void back_to_scheduler(Fiber& fiber) {
  __sanitizer_start_switch_fiber(&fiber.fake_stack, exec.scheduler_stack, exec.scheduler_bytes);
  swapcontext(&fiber.context, &exec.scheduler);
  __sanitizer_finish_switch_fiber(fiber.fake_stack, &exec.scheduler_stack, &exec.scheduler_bytes);
}

void switch_to(Fiber& fiber) {
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, fiber.memory, kStackBytes);
  swapcontext(&exec.scheduler, &fiber.context);
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

void work(unsigned low, unsigned high) {
  Fiber& fiber = *reinterpret_cast<Fiber*>(uint64_t{high} << 32 | low);
  __sanitizer_finish_switch_fiber(nullptr, &exec.scheduler_stack, &exec.scheduler_bytes);
  for (;;) {
    while (exec.begun < exec.threads.size()) {
      const size_t place = exec.begun++;
      Thread& thread = exec.threads[exec.backwards ? exec.threads.size() - 1 - place : place];
      thread.fiber = &fiber;
      thread.state = State::runnable;
      enter(thread);
      (*exec.body)();
      thread.state = State::left;
    }
    exec.idle.push_back(&fiber);
    back_to_scheduler(fiber);
  }
}

Fiber::Fiber() {
  void* pages = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED || mprotect(pages, kGuardBytes, PROT_NONE) != 0) throw std::bad_alloc();
  memory = static_cast<char*>(pages);
  getcontext(&context);
  context.uc_stack.ss_sp = memory;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  const auto address = reinterpret_cast<uint64_t>(this);
  makecontext(&context, reinterpret_cast<void (*)()>(&work), 2, static_cast<unsigned>(address),
              static_cast<unsigned>(address >> 32));
}

void wait_as(State state) {
  Thread& self = *exec.running;
  self.state = state;
  back_to_scheduler(*self.fiber);
  enter(self);
}

// ---- meeting

std::string lane_name(unsigned index) {
  return "lane " + std::to_string(index % kWarp) + " of warp " + std::to_string(index / kWarp);
}

std::string hex(uint32_t mask) {
  std::ostringstream text;
  text << "0x" << std::hex << mask;
  return text.str();
}

// True once all lanes that the mask names are there; their values are exchanged then.
bool complete_shuffle(const Thread& waiting) {
  const unsigned self = index_of(waiting), first = self / kWarp * kWarp;
  if (!(waiting.mask >> self % kWarp & 1)) {
    break_rule(lane_name(self), " shuffles with mask ", hex(waiting.mask), ", which does not name it");
  }
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if (!(waiting.mask >> lane & 1)) continue;
    const unsigned index = first + lane;
    const bool exists = index < exec.threads.size();
    if (!exists || exec.threads[index].state == State::left) {
      break_rule(lane_name(self), " shuffles with mask ", hex(waiting.mask), ", but ",
                 exists ? "" : "the block has no ", lane_name(index), exists ? " has left the kernel" : "");
    }
    const Thread& other = exec.threads[index];
    if (other.state != State::shuffling || other.mask != waiting.mask) return false;
    if (other.partner >= kWarp || !(waiting.mask >> other.partner & 1)) {
      break_rule(lane_name(index), " reads lane ", other.partner, ", which mask ", hex(waiting.mask),
                 " does not name");
    }
  }
  uint32_t values[kWarp];
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if (waiting.mask >> lane & 1) values[lane] = exec.threads[first + lane].value;
  }
  for (unsigned lane = 0, mask = waiting.mask; lane < kWarp; ++lane) {
    if (!(mask >> lane & 1)) continue;
    Thread& member = exec.threads[first + lane];
    member.value = values[member.partner];
    member.state = State::runnable;
  }
  return true;
}

bool complete_barrier() {
  const Thread *waiting = nullptr, *absent = nullptr, *gone = nullptr;
  for (const Thread& thread : exec.threads) {
    (thread.state == State::at_barrier ? waiting : thread.state == State::left ? gone : absent) = &thread;
  }
  if (waiting == nullptr || absent != nullptr) return false;
  if (gone != nullptr) {
    break_rule("thread ", index_of(*waiting), " waits at __syncthreads, but thread ", index_of(*gone),
               " has left the kernel");
  }
  for (Thread& thread : exec.threads) thread.state = State::runnable;
  return true;
}

// Lets go on who can; false where every thread has left.
bool let_go_on() {
  bool any = false, waiting = false;
  for (Thread& thread : exec.threads) {
    if (thread.state == State::shuffling) any |= complete_shuffle(thread);
    waiting |= thread.state != State::left;
  }
  any |= complete_barrier();
  if (any || !waiting) return any;
  std::ostringstream text;
  for (const Thread& thread : exec.threads) {
    if (thread.state == State::left) continue;
    const bool shuffling = thread.state == State::shuffling;
    text << "; " << lane_name(index_of(thread))
         << (shuffling ? " shuffles with mask " + hex(thread.mask) : " waits at __syncthreads");
    if (text.tellp() > 300) break;
  }
  break_rule("no thread of the block can go on", text.str());
}

void run_block() {
  exec.threads.assign(size_t{exec.block_size.x} * exec.block_size.y * exec.block_size.z, Thread());
  exec.begun = 0;
  do {
    while (exec.begun < exec.threads.size()) {
      if (exec.idle.empty()) {
        exec.fibers.push_back(std::make_unique<Fiber>());
        exec.idle.push_back(exec.fibers.back().get());
      }
      Fiber& fiber = *exec.idle.back();
      exec.idle.pop_back();
      switch_to(fiber);
    }
    for (size_t place = 0; place < exec.threads.size(); ++place) {
      const Thread& thread = exec.threads[exec.backwards ? exec.threads.size() - 1 - place : place];
      if (thread.state == State::runnable) switch_to(*thread.fiber);
    }
  } while (let_go_on());
}

cudaError_t refusal(const Launch& launch) {
  const dim3 &grid = launch.grid, &block = launch.block;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  const bool blocks_fit = grid.x <= 0x7fffffff && grid.y <= 65535 && grid.z <= 65535;
  const bool threads_fit = block.x <= 1024 && block.y <= 1024 && block.z <= 64 && threads <= 1024;
  const bool any = uint64_t{grid.x} * grid.y * grid.z > 0 && threads > 0;
  if (!any || !blocks_fit || !threads_fit || threads > launch.max_threads) return cudaErrorInvalidConfiguration;
  if (launch.shared_bytes > kMaxSharedBytes) return cudaErrorInvalidValue;
  return check_stream(launch.stream);
}

void check_reads(const char* kernel) {
  for (const Read& read : exec.reads) {
    if (std::memcmp(read.source, read.value, read.bytes) == 0) continue;
    break_rule(kernel, ": memory that was read through __ldg was written during the same launch");
  }
}

}  // namespace

void run(const Launch& launch, const std::function<void()>& thread) {
  const std::lock_guard<std::mutex> lock(exec.one_launch);
  if (const cudaError_t error = refusal(launch); error != cudaSuccess) return set_last_error(error);
  exec.backwards = !exec.backwards;
  exec.body = &thread;
  exec.block_size = launch.block;
  exec.grid_size = launch.grid;
  exec.reads.clear();
  const uint64_t plane = uint64_t{launch.grid.x} * launch.grid.y, blocks = plane * launch.grid.z;
  try {
    for (uint64_t place = 0; place < blocks; ++place) {
      const uint64_t index = exec.backwards ? blocks - 1 - place : place;
      exec.block = dim3(static_cast<unsigned>(index % launch.grid.x),
                        static_cast<unsigned>(index % plane / launch.grid.x), static_cast<unsigned>(index / plane));
      run_block();
    }
  } catch (const std::exception&) {
    // Threads stand still in the middle of their stacks.
    exec.idle.clear();
    exec.fibers.clear();
    throw;
  }
  size_t widest = 0;
  for (const Read& read : exec.reads) widest = std::max<size_t>(widest, read.bytes);
  note_launch(launch, widest);
  check_reads(launch.kernel);
}

const dim3& thread_index() { return exec.thread; }
const dim3& block_index() { return exec.block; }
const dim3& block_size() { return exec.block_size; }
const dim3& grid_size() { return exec.grid_size; }

void note_read_only(const void* source, const void* value, size_t bytes) {
  Read read = {source, {}, static_cast<uint8_t>(bytes)};
  std::memcpy(read.value, value, bytes);
  exec.reads.push_back(read);
}

uint32_t shuffle_xor(uint32_t mask, uint32_t value, int lane_mask) {
  Thread& self = *exec.running;
  self.mask = mask;
  self.value = value;
  self.partner = (index_of(self) % kWarp) ^ static_cast<uint32_t>(lane_mask);
  wait_as(State::shuffling);
  return self.value;
}

void barrier() { wait_as(State::at_barrier); }

}  // namespace host_cuda

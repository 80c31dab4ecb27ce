// Run-time detection through cpuid, the enabled register state (XCR0) and, for AMX, the permission of the kernel.
#include "cpu/isa.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>

#include "check.h"

#if HYDRA_X86
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace hydra {
namespace {

struct Features {
  bool avx2 = false, fma = false, f16c = false, bmi2 = false;
  bool avx512f = false, avx512bw = false, avx512vl = false, avx512dq = false, avx512bf16 = false;
  bool avx_vnni = false, avx512_vnni = false;
  bool amx_tile = false, amx_bf16 = false, amx_int8 = false;
};

#if HYDRA_X86

uint64_t enabled_state() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

// Linux gives the 8 KiB of tile registers only to processes that ask; asking again is harmless.
bool request_amx() {
#ifdef __linux__
  constexpr int kArchReqXcompPerm = 0x1023;
  constexpr int kTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
#else
  return false;
#endif
}

bool bit(uint32_t word, int index) { return word >> index & 1u; }

Features detect() {
  Features found;
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27)) return found;  // 27: OSXSAVE, xgetbv is usable
  const uint64_t state = enabled_state();
  if ((state & 0x6) != 0x6) return found;  // SSE and AVX registers are saved by the system
  found.fma = bit(c, 12);
  found.f16c = bit(c, 29);
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  found.avx2 = bit(b, 5);
  found.bmi2 = bit(b, 8);
  const uint32_t max_subleaf = a;
  uint32_t a1 = 0, b1, c1, d1;
  if (max_subleaf >= 1) __get_cpuid_count(7, 1, &a1, &b1, &c1, &d1);
  found.avx_vnni = bit(a1, 4);
  if ((state & 0xe0) == 0xe0) {  // mask registers and both halves of the 512-bit registers
    found.avx512f = bit(b, 16);
    found.avx512dq = bit(b, 17);
    found.avx512bw = bit(b, 30);
    found.avx512vl = bit(b, 31);
    found.avx512bf16 = bit(a1, 5);
    found.avx512_vnni = bit(c, 11);
  }
  if ((state & 0x60000) == 0x60000 && bit(d, 24) && bit(d, 22) && request_amx()) {
    found.amx_tile = true;
    found.amx_bf16 = true;
    found.amx_int8 = bit(d, 25);
  }
#ifdef HYDRA_EMULATED
  found.avx512f = found.avx512bw = found.avx512vl = found.avx512dq = found.avx512bf16 = found.avx2;
  found.avx_vnni = found.avx512_vnni = found.amx_tile = found.amx_bf16 = found.amx_int8 = found.avx2;
#endif
  return found;
}

#else

Features detect() { return {}; }

#endif

const Features& features() {
  static const Features found = detect();
  return found;
}

Isa best_level(const Features& f) {
  if (!(f.avx2 && f.fma && f.f16c && f.bmi2)) return Isa::scalar;
  if (!(f.avx512f && f.avx512bw && f.avx512vl && f.avx512dq)) return Isa::avx2;
  if (!f.avx512bf16) return Isa::avx512;
  return f.amx_tile && f.amx_bf16 ? Isa::amx : Isa::avx512bf16;
}

constexpr const char* kNames[] = {"scalar", "avx2", "avx512", "avx512bf16", "amx"};
constexpr const char* kVariable = "HYDRA_MAX_CPU_ISA";

Isa named(const std::string& name, const char* where) {
  for (int i = 0; i < 5; ++i) {
    if (name == kNames[i]) return static_cast<Isa>(i);
  }
  HYDRA_CHECK(false, where, ": expected scalar, avx2, avx512, avx512bf16 or amx, got '", name, "'");
}

// The lower one of what the processor has and HYDRA_MAX_CPU_ISA asks for.
Isa initial_level() {
  const char* most = std::getenv(kVariable);
  return most == nullptr || *most == '\0' ? supported_isa() : std::min(supported_isa(), named(most, kVariable));
}

std::atomic<Isa>& level() {
  static std::atomic<Isa> value{initial_level()};
  return value;
}

}  // namespace

const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

Isa supported_isa() { return best_level(features()); }

Isa current_isa() { return level().load(std::memory_order_relaxed); }

void force_isa(const std::string& name) {
  const Isa wanted = named(name, "isa");
  HYDRA_CHECK(wanted <= supported_isa(), "isa: this machine supports levels up to '", isa_name(supported_isa()),
              "', got '", name, "'");
  level().store(wanted, std::memory_order_relaxed);
}

bool has_avx_vnni() { return features().avx_vnni && current_isa() >= Isa::avx2; }

bool has_avx512_vnni() { return features().avx512_vnni && current_isa() >= Isa::avx512; }

bool has_amx_int8() { return features().amx_int8 && current_isa() == Isa::amx; }

std::vector<std::string> cpu_features() {
  const Features& f = features();
  std::vector<std::string> names;
  const auto add = [&names](bool present, const char* name) {
    if (present) names.emplace_back(name);
  };
  add(f.avx2, "avx2");
  add(f.fma, "fma");
  add(f.f16c, "f16c");
  add(f.bmi2, "bmi2");
  add(f.avx512f, "avx512f");
  add(f.avx512bw, "avx512bw");
  add(f.avx512vl, "avx512vl");
  add(f.avx512dq, "avx512dq");
  add(f.avx512bf16, "avx512_bf16");
  add(f.avx_vnni, "avx_vnni");
  add(f.avx512_vnni, "avx512_vnni");
  add(f.amx_tile, "amx_tile");
  add(f.amx_bf16, "amx_bf16");
  add(f.amx_int8, "amx_int8");
  return names;
}

}  // namespace hydra

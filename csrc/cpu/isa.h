// The instruction sets that this machine and its operating system support, detected once at run time.
// Kernels are compiled per level with function-level target attributes, so one build runs on any x86-64.
#pragma once

#include <string>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#define HYDRA_X86 1
#else
#define HYDRA_X86 0
#endif

#if HYDRA_X86
#define HYDRA_TARGET_AVX2 __attribute__((target("avx2,fma,f16c,bmi2")))
#ifdef HYDRA_EMULATED  // a build for tests, see setup.py: what is above AVX2 is C++
#define HYDRA_TARGET_ABOVE(features) HYDRA_TARGET_AVX2
#else
#define HYDRA_TARGET_ABOVE(features) __attribute__((target("avx2,fma,f16c,bmi2," features)))
#endif
#define HYDRA_AVX512 "avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512"
#define HYDRA_TARGET_AVX512 HYDRA_TARGET_ABOVE(HYDRA_AVX512)
#define HYDRA_TARGET_AVXVNNI HYDRA_TARGET_ABOVE("avxvnni")
#define HYDRA_TARGET_AVX512VNNI HYDRA_TARGET_ABOVE(HYDRA_AVX512 ",avx512vnni")
#define HYDRA_TARGET_AVX512BF16 HYDRA_TARGET_ABOVE(HYDRA_AVX512 ",avx512bf16")
#define HYDRA_TARGET_AMX HYDRA_TARGET_ABOVE(HYDRA_AVX512 ",avx512bf16,amx-tile,amx-bf16,amx-int8")
#endif

namespace hydra {

// Ordered: a level includes all lower ones. avx512 = AVX-512 F/BW/VL/DQ; avx512bf16 adds BF16, amx AMX_TILE and AMX_BF16.
enum class Isa : int { scalar = 0, avx2 = 1, avx512 = 2, avx512bf16 = 3, amx = 4 };

const char* isa_name(Isa isa);

// The highest level that processor and operating system support.
Isa supported_isa();

// The level in use: supported_isa() unless the variable HYDRA_MAX_CPU_ISA or force_isa lowered it. Throws
// std::invalid_argument where the variable is no level's name.
Isa current_isa();

// For tests: lowers the level of the whole process, or restores it. Throws std::invalid_argument for an unknown name
// or a level above supported_isa().
void force_isa(const std::string& name);

// Products of bytes, which processors of one level have or lack; false below the levels avx2, avx512 and amx.
bool has_avx_vnni();
bool has_avx512_vnni();
bool has_amx_int8();

// Names of the relevant features found, for the environment card.
std::vector<std::string> cpu_features();

}  // namespace hydra

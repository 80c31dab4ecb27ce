// Words of a matrix turned around, for formats that store inputs before outputs.
#pragma once

#include <cstdint>

namespace hydra {

// target[c, r] = source[r, c], both contiguous; on all threads.
void transpose_words(const uint32_t* source, int64_t rows, int64_t columns, uint32_t* target);

}  // namespace hydra

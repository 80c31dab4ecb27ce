// Rounding of weights for processors without AVX2, and for other architectures.
#define HYDRA_LEVEL scalar
#define HYDRA_LANES 4
#define HYDRA_TARGET
#include "cpu/quantized/rounding_rows.h"

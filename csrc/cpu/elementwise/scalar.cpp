// Norms and gated activations without AVX2, and for other architectures.
#define HYDRA_LEVEL scalar
#define HYDRA_LANES 4
#define HYDRA_TARGET
#include "cpu/elementwise/best.h"
#include "cpu/elementwise/rows.h"

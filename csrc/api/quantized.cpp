// Entry points of the matrix products with weights of 8 and 4 bits. As in api/linear.cpp, Python owns the memory.
#include "cpu/quantized/ggml.h"
#include "cpu/quantized/quantized.h"
#include "cpu/quantized/rounding.h"
#include "cpu/quantized/transpose.h"

#include "api/api.h"
#include "api/recording.h"

namespace hydra {
namespace {

namespace py = pybind11;

constexpr Address kAlignment = 64;

PackedQuantized make_quantized(Address data, Address bias, int64_t num_out, int64_t num_in, int64_t groups,
                               int num_bits, int scale_dtype, bool has_offsets, bool two_levels) {
  HYDRA_CHECK(num_out >= 0 && num_in >= 0, "num_out, num_in: expected sizes of at least 0, got ", num_out, ", ",
              num_in);
  HYDRA_CHECK(num_bits == 4 || num_bits == (two_levels ? 6 : 8), "num_bits: expected ", two_levels ? 6 : 8,
              " or 4, got ", num_bits);
  HYDRA_CHECK(num_in * num_bits % 8 == 0, "num_in: expected an even number for 4 bits, got ", num_in);
  HYDRA_CHECK(groups == 1 || (groups > 1 && num_in % (groups * 16) == 0),
              "groups: expected 1, or groups of a multiple of 16 of the ", num_in, " inputs, got ", groups);
  HYDRA_CHECK(!two_levels || (num_in % kBlockInputs == 0 && num_in > 0 && groups % (num_in / kBlockInputs) == 0),
              "groups: expected a multiple of the blocks of ", kBlockInputs, " of the ", num_in, " inputs, got ",
              groups);
  HYDRA_CHECK(data % kAlignment == 0, "data: expected an address aligned to 64 bytes, got ", data);
  HYDRA_CHECK(bias % 4 == 0, "bias: expected an address aligned to 4 bytes, got ", bias);
  const DType scales = two_levels ? DType::f32 : dtype_from_int(scale_dtype);
  return {pointer<void>(data), pointer<float>(bias), num_out, num_in, groups, num_bits, scales, has_offsets,
          two_levels};
}

int64_t quantized_bytes(int64_t num_out, int64_t num_in, int64_t groups, int num_bits, int scale_dtype,
                        bool has_offsets, bool two_levels) {
  return make_quantized(0, 0, num_out, num_in, groups, num_bits, scale_dtype, has_offsets, two_levels).num_bytes();
}

void pack(const PackedQuantized& packed, Address values, Address scales, Address offsets, Address block_scales) {
  HYDRA_CHECK(packed.data && values && scales, "data, values, scales: expected addresses, got 0");
  HYDRA_CHECK(packed.has_offsets == (offsets != 0), "offsets: expected an address if the weight has them, got ",
              offsets);
  HYDRA_CHECK(packed.two_levels == (block_scales != 0),
              "block_scales: expected an address if the weight has them, got ", block_scales);
  pack_quantized(packed, {pointer<uint8_t>(values), pointer<void>(scales), pointer<void>(offsets),
                          pointer<f16_t>(block_scales)});
}

void run_linear(const PackedQuantized& weight, Address x, int64_t x_stride, int64_t rows, Address out, int act,
                int x_dtype, int out_dtype, Address residual, int64_t residual_stride) {
  QuantizedCall call;
  call.weight = weight;
  LinearCall& result = call.result;
  result.weight = {nullptr, weight.bias, weight.num_out, weight.num_in, dtype_from_int(x_dtype)};
  result.x = pointer<void>(x);
  result.x_stride = x_stride;
  result.out = pointer<void>(out);
  result.out_stride = weight.num_out;
  result.residual = pointer<void>(residual);
  result.residual_stride = residual_stride;
  result.rows = rows;
  result.act = activation_from_int(act);
  result.out_dtype = dtype_from_int(out_dtype);
  HYDRA_CHECK(rows >= 0, "rows: expected at least 0, got ", rows);
  perform([call] { linear_quantized(call); });
}

void round_matrix(Address weight, int dtype, int64_t num_out, int64_t num_in, int num_bits, Address values,
                  Address scales) {
  HYDRA_CHECK(num_out >= 0 && num_in >= 1, "num_out, num_in: expected sizes of at least 0 and 1, got ", num_out, ", ",
              num_in);
  HYDRA_CHECK(num_bits == 8 || (num_bits == 4 && num_in % kRoundingGroup == 0),
              "num_bits: expected 8, or 4 for a multiple of 32 inputs, got ", num_bits, " for ", num_in);
  round_weight({pointer<void>(weight), dtype_from_int(dtype), num_out, num_in, num_bits, pointer<uint8_t>(values),
                pointer<void>(scales)});
}

void decode_blocks(int type, Address blocks, int64_t count, Address values, Address scales, Address offsets,
                   Address block_scales) {
  HYDRA_CHECK(type >= 0 && type <= 4, "type: expected 0 to 4, got ", type);
  const GgmlType kind = static_cast<GgmlType>(type);
  const bool has_offsets = kind == GgmlType::q4_k || kind == GgmlType::q5_k;
  HYDRA_CHECK(count >= 0 && has_offsets == (offsets != 0), "offsets: expected an address if the type has them, got ",
              offsets);
  HYDRA_CHECK((has_offsets || kind == GgmlType::q6_k) == (block_scales != 0),
              "block_scales: expected an address if the type has them, got ", block_scales);
  decode_ggml({kind, pointer<uint8_t>(blocks), count, pointer<uint8_t>(values), pointer<void>(scales),
               pointer<int8_t>(offsets), pointer<f16_t>(block_scales)});
}

void transpose(Address source, int64_t rows, int64_t columns, Address target) {
  HYDRA_CHECK(rows >= 0 && columns >= 0, "rows, columns: expected sizes of at least 0, got ", rows, ", ", columns);
  transpose_words(pointer<uint32_t>(source), rows, columns, pointer<uint32_t>(target));
}

}  // namespace

void register_quantized(py::module_& m) {
  m.def("quantized_bytes", &quantized_bytes, py::arg("num_out"), py::arg("num_in"), py::arg("groups"),
        py::arg("num_bits"), py::arg("scale_dtype"), py::arg("has_offsets"), py::arg("two_levels") = false);
  py::class_<PackedQuantized>(m, "PackedQuantized")
      .def(py::init(&make_quantized), py::arg("data"), py::arg("bias"), py::arg("num_out"), py::arg("num_in"),
           py::arg("groups"), py::arg("num_bits"), py::arg("scale_dtype"), py::arg("has_offsets"),
           py::arg("two_levels") = false)
      .def("pack", &pack, py::arg("values"), py::arg("scales"), py::arg("offsets"), py::arg("block_scales") = 0,
           ReleaseGil());
  m.def("linear_quantized", &run_linear, py::arg("weight"), py::arg("x"), py::arg("x_stride"), py::arg("rows"),
        py::arg("out"), py::arg("act"), py::arg("x_dtype"), py::arg("out_dtype"), py::arg("residual") = 0,
        py::arg("residual_stride") = 0, ReleaseGil());
  m.def("round_matrix", &round_matrix, py::arg("weight"), py::arg("dtype"), py::arg("num_out"), py::arg("num_in"),
        py::arg("num_bits"), py::arg("values"), py::arg("scales"), ReleaseGil());
  m.def("decode_blocks", &decode_blocks, py::arg("type"), py::arg("blocks"), py::arg("count"), py::arg("values"),
        py::arg("scales"), py::arg("offsets"), py::arg("block_scales") = 0, ReleaseGil());
  m.def("transpose_words", &transpose, py::arg("source"), py::arg("rows"), py::arg("columns"), py::arg("target"),
        ReleaseGil());
}

}  // namespace hydra

// The attention branch in inference, from a layer's input to the weights of the mixtures: a dozen tiny steps that cost
// more to start than to do.
#pragma once

#include <ATen/ops/linear.h>
#include <ATen/ops/mean.h>

#include <cmath>
#include <optional>
#include <tuple>

#include "checks.h"
#include "layer.h"

namespace kernelwarehouse {

// The sum of one channel: a sum for every lane in blocks, and doubles from block to block, lose little.
inline double sum_of(const float* from, Int count) {
  constexpr Int block = 64 * kLanes;
  double sum = 0;
  Int i = 0;
  for (; i + kLanes <= count;) {
    const Int end = std::min(i + block, count / kLanes * kLanes);
    Lanes partial[4] = {};
    for (; i + 4 * kLanes <= end; i += 4 * kLanes)
      for (int v = 0; v < 4; ++v) partial[v] += load(from + i + v * kLanes);
    for (; i < end; i += kLanes) partial[0] += load(from + i);
    sum += total((partial[0] + partial[1]) + (partial[2] + partial[3]));
  }
  for (; i < count; ++i) sum += from[i];
  return sum;
}

// [batch, channels, *space] -> means [batch, channels]; what has no positions is left as it is.
inline Tensor mean_over_positions(const Tensor& x) {
  if (x.dim() == 2) return x;
  if (!x.is_contiguous()) return x.flatten(2).mean(2);
  const Int rows = x.size(0) * x.size(1), positions = x.numel() / rows;
  Tensor means = at::empty({x.size(0), x.size(1)}, x.options());
  const float* from = x.const_data_ptr<float>();
  float* to = means.mutable_data_ptr<float>();
  at::parallel_for(0, rows, std::max<Int>(1, 65536 / positions), [&](Int begin, Int end) {
    for (Int row = begin; row < end; ++row)
      to[row] = static_cast<float>(sum_of(from + row * positions, positions) / static_cast<double>(positions));
  });
  return means;
}

// Batch normalisation with running statistics and ReLU, in place.
inline void normalise_and_rectify(Tensor& features, const Tensor& weight, const Tensor& bias, const Tensor& mean,
                                  const Tensor& variance, double epsilon) {
  const Int width = features.size(1);
  const float *w = weight.const_data_ptr<float>(), *b = bias.const_data_ptr<float>();
  const float *m = mean.const_data_ptr<float>(), *v = variance.const_data_ptr<float>();
  float* data = features.mutable_data_ptr<float>();
  std::vector<float> scale(width);
  for (Int k = 0; k < width; ++k) scale[k] = w[k] / std::sqrt(v[k] + static_cast<float>(epsilon));
  for (Int row = 0; row < features.size(0); ++row, data += width)
    for (Int k = 0; k < width; ++k) {
      const float value = (data[k] - m[k]) * scale[k] + b[k];
      data[k] = value < 0 ? 0 : value;  // NaN stays NaN
    }
}

// x [batch, in] times the transpose of weight [out, in], plus bias: for few samples the loop is faster than a library.
inline Tensor small_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const Int batch = x.size(0), in = weight.size(1), out = weight.size(0);
  if (batch > 2 || !x.is_contiguous() || !weight.is_contiguous()) return at::linear(x, weight, bias);
  Tensor y = at::empty({batch, out}, x.options());
  const float* w = weight.const_data_ptr<float>();
  const float* offset = bias.has_value() ? bias->const_data_ptr<float>() : nullptr;
  for (Int row = 0; row < batch; ++row) {
    const float* from = x.const_data_ptr<float>() + row * in;
    float* to = y.mutable_data_ptr<float>() + row * out;
    for (Int o = 0; o < out; ++o) {
      const float* line = w + o * in;
      Lanes partial = {};
      Int k = 0;
      for (; k + kLanes <= in; k += kLanes) partial += load(from + k) * load(line + k);
      float sum = offset == nullptr ? 0 : offset[o];
      for (; k < in; ++k) sum += from[k] * line[k];
      to[o] = sum + total(partial);
    }
  }
  return y;
}

// x [batch, channels, *space], fc1 [hidden, channels], the norm's vectors [hidden], fc2 [mixtures * (n + 1), hidden].
inline void check_branch(const Tensor& x, const Tensor& fc1, const Tensor& norm_weight, const Tensor& norm_bias,
                         const Tensor& mean, const Tensor& variance, const Tensor& fc2, const Tensor& fc2_bias,
                         Int mixtures) {
  // The mean of no position is no number; a batch of no means is fine.
  TORCH_CHECK_VALUE(x.dim() == 2 || (x.dim() > 2 && x.numel() > 0), "x has sizes ", x.sizes(),
                    "; [batch, channels] or [batch, channels, *space] is wanted, with something to take a mean of");
  TORCH_CHECK_VALUE(fc1.dim() == 2 && fc2.dim() == 2 && x.size(1) == fc1.size(1) && fc1.size(0) == fc2.size(1),
                    "x of sizes ", x.sizes(), ", fc1 of sizes ", fc1.sizes(), " and fc2 of sizes ", fc2.sizes(),
                    " do not follow each other");
  check(norm_weight, "norm_weight", {fc1.size(0)});
  check(norm_bias, "norm_bias", {fc1.size(0)});
  check(mean, "mean", {fc1.size(0)});
  check(variance, "variance", {fc1.size(0)});
  check(fc2_bias, "fc2_bias", {fc2.size(0)});
  TORCH_CHECK_VALUE(mixtures > 0 && fc2.size(0) > 0 && fc2.size(0) % mixtures == 0, "fc2 makes ", fc2.size(0),
                    " logits for ", mixtures, " mixtures");
}

// The hidden vector [batch, hidden] of inputs [batch, channels, *space].
inline Tensor attention_hidden(const Tensor& x, const Tensor& fc1, const Tensor& norm_weight, const Tensor& norm_bias,
                               const Tensor& mean, const Tensor& variance, double epsilon) {
  Tensor hidden = small_linear(mean_over_positions(x), fc1, std::nullopt);
  normalise_and_rectify(hidden, norm_weight, norm_bias, mean, variance, epsilon);
  return hidden;
}

inline float absolute_sum(const float* from, Int count) {
  Lanes partial = {};  // a sum for every lane: faster, and closer to the true sum, than one
  Int j = 0;
  for (; j + kLanes <= count; j += kLanes) {
    const Lanes value = load(from + j);
    partial += value < 0 ? -value : value;
  }
  float sum = 0;
  for (; j < count; ++j) sum += std::fabs(from[j]);
  return sum + total(partial);
}

// tau * beta + (1 - tau) * z / (sum |z| + epsilon), for logits [batch, mixtures, n + 1] -> [batch, mixtures, n].
inline Tensor attention_weights(const Tensor& logits, const std::optional<Tensor>& beta, double tau, double epsilon) {
  const Int rows = logits.size(0) * logits.size(1), mixtures = logits.size(1), n = logits.size(2) - 1;
  Tensor weights = at::empty({logits.size(0), mixtures, n}, logits.options());
  const float* z = logits.const_data_ptr<float>();
  float* to = weights.mutable_data_ptr<float>();
  const bool* start = beta.has_value() && tau != 0 ? beta->const_data_ptr<bool>() : nullptr;
  at::parallel_for(0, rows, std::max<Int>(1, 16384 / (n + 1)), [&](Int begin, Int end) {
    for (Int row = begin; row < end; ++row) {
      const float* from = z + row * (n + 1);
      const float sum = absolute_sum(from, n + 1);
      const float scale = static_cast<float>((1 - tau) / (sum + epsilon));
      for (Int j = 0; j < n; ++j) to[row * n + j] = from[j] * scale;
      if (start != nullptr)
        for (Int j = 0; j < n; ++j)
          if (start[row % mixtures * n + j]) to[row * n + j] += static_cast<float>(tau);
    }
  });
  return weights;
}

// Both, with the linear layer between them: inputs -> [batch, mixtures, n]. The temperature is a whole number of units.
inline Tensor attention(const Tensor& x, const Tensor& fc1, const Tensor& norm_weight, const Tensor& norm_bias,
                        const Tensor& mean, const Tensor& variance, double norm_epsilon, const Tensor& fc2,
                        const Tensor& fc2_bias, Int mixtures, const std::optional<Tensor>& beta,
                        const Tensor& temperature, double temperature_unit, double epsilon) {
  check_branch(x, fc1, norm_weight, norm_bias, mean, variance, fc2, fc2_bias, mixtures);
  if (beta) check(*beta, "beta", {mixtures, fc2.size(0) / mixtures - 1}, at::kBool);
  check(temperature, "temperature", {}, at::kLong);
  const double tau = static_cast<double>(*temperature.const_data_ptr<Int>()) * temperature_unit;
  const Tensor hidden = attention_hidden(x, fc1, norm_weight, norm_bias, mean, variance, norm_epsilon);
  const Tensor logits = small_linear(hidden, fc2, fc2_bias);
  return attention_weights(logits.view({logits.size(0), mixtures, logits.size(1) / mixtures}), beta, tau, epsilon);
}

// For mixing through the hidden vector: (the hidden vector and a 1 [batch, hidden + 1], 1 / normaliser [batch,
// mixtures]).
inline std::tuple<Tensor, Tensor> attention_coefficients(const Tensor& x, const Tensor& fc1, const Tensor& norm_weight,
                                                         const Tensor& norm_bias, const Tensor& mean,
                                                         const Tensor& variance, double norm_epsilon, const Tensor& fc2,
                                                         const Tensor& fc2_bias, Int mixtures, double epsilon) {
  check_branch(x, fc1, norm_weight, norm_bias, mean, variance, fc2, fc2_bias, mixtures);
  const Tensor hidden = attention_hidden(x, fc1, norm_weight, norm_bias, mean, variance, norm_epsilon);
  const Tensor logits = small_linear(hidden, fc2, fc2_bias);
  const Int batch = hidden.size(0), width = hidden.size(1), cells = logits.size(1) / mixtures;
  Tensor extended = at::empty({batch, width + 1}, hidden.options());
  Tensor scale = at::empty({batch, mixtures}, hidden.options());
  float* to = extended.mutable_data_ptr<float>();
  for (Int row = 0; row < batch; ++row) {
    std::copy_n(hidden.const_data_ptr<float>() + row * width, width, to + row * (width + 1));
    to[row * (width + 1) + width] = 1;
  }
  for (Int row = 0; row < batch * mixtures; ++row)
    scale.mutable_data_ptr<float>()[row] =
        static_cast<float>(1 / (absolute_sum(logits.const_data_ptr<float>() + row * cells, cells) + epsilon));
  return {extended, scale};
}

}  // namespace kernelwarehouse

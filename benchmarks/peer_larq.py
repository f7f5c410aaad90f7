"""Larq Compute Engine and TensorFlow Lite for an ONNX network, through Keras."""

from __future__ import annotations

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import larq
import numpy as np
import tensorflow as tf
from peer_graph import Signed, Translator

K = tf.keras.layers


class Keras(Translator):
    """Translates to Keras layers, NHWC."""

    def __init__(self, model) -> None:
        self._weights: list[tuple[K.Layer, list[np.ndarray]]] = []
        super().__init__(model)
        self.model = tf.keras.Model(self.parameter, self.output)
        for layer, weights in self._weights:
            layer.set_weights(weights)

    def _with(self, layer, *weights):
        self._weights.append((layer, [np.asarray(w, np.float32) for w in weights]))
        return layer

    def input(self, shape):
        batch, channels, height, width = shape
        self.parameter = tf.keras.Input((height, width, channels), batch_size=batch)
        return self.parameter

    def _padding(self, x, kernel, strides, pads):
        """Return Keras' word for the padding, or none if it has no word."""
        if not any(pads):
            return "valid"
        wanted: list[list[int]] = [[], []]
        for size, k, s in zip(x.shape[1:3], kernel, strides, strict=True):
            total = max((-(-size // s) - 1) * s + k - size, 0)
            wanted[0].append(total // 2)
            wanted[1].append(total - total // 2)
        return "same" if list(pads) == wanted[0] + wanted[1] else None

    def binary_conv(self, x: Signed, weight, strides):
        padding = self._padding(x.value, weight.shape[2:], strides, x.pads)
        if padding is None:
            raise SystemExit("Larq pads binary convolutions as TensorFlow does, or not at all")
        layer = larq.layers.QuantConv2D(
            weight.shape[0], weight.shape[2:], strides, padding, pad_values=x.pad_value,
            input_quantizer="ste_sign", kernel_quantizer="ste_sign", use_bias=False,
        )  # fmt: skip
        return self._with(layer, weight.transpose(2, 3, 1, 0))(x.value)

    def conv(self, x, weight, bias, strides, pads, groups):
        padding = self._padding(x, weight.shape[2:], strides, pads)
        if padding is None:
            x = K.ZeroPadding2D(((pads[0], pads[2]), (pads[1], pads[3])))(x)
            padding = "valid"
        more = [] if bias is None else [bias]
        kernel, use = weight.shape[2:], bias is not None
        if groups == 1:
            layer = K.Conv2D(weight.shape[0], kernel, strides, padding, use_bias=use)
            return self._with(layer, weight.transpose(2, 3, 1, 0), *more)(x)
        if groups != x.shape[-1] or weight.shape[0] != groups:
            raise SystemExit("only depthwise groups are translated")
        layer = K.DepthwiseConv2D(kernel, strides, padding, use_bias=use)
        return self._with(layer, weight.transpose(2, 3, 0, 1), *more)(x)

    def affine(self, x, scale, shift):
        count = x.shape[-1]
        ones, zeros = np.ones(count), np.zeros(count)
        layer = K.BatchNormalization(epsilon=0.0)
        scale = ones if scale is None else np.broadcast_to(scale, count)
        shift = zeros if shift is None else np.broadcast_to(shift, count)
        return self._with(layer, scale, shift, zeros, ones)(x)

    def relu(self, x):
        return K.Activation("relu")(x)

    def prelu(self, x, slope):
        layer = K.PReLU(shared_axes=[1, 2])
        return self._with(layer, np.broadcast_to(slope, x.shape[-1]).reshape(1, 1, -1))(x)

    def clip(self, x, low, high):
        return tf.clip_by_value(x, low, high)

    def add(self, x, y):
        return K.Add()([x, y])

    def concat(self, values):
        return K.Concatenate()(values)

    def pool(self, kind, x, kernel, strides, pads):
        padding = self._padding(x, kernel, strides, pads)
        if padding is None and kind == "max":
            edges = ((0, 0), (pads[0], pads[2]), (pads[1], pads[3]), (0, 0))
            x, padding = tf.pad(x, edges, constant_values=-3e38), "valid"
        if padding is None:
            raise SystemExit("this padded average pool is not translated")
        layer = K.MaxPool2D if kind == "max" else K.AveragePooling2D
        return layer(kernel, strides, padding)(x)

    def global_average(self, x):
        return K.GlobalAveragePooling2D(keepdims=True)(x)

    def flatten(self, x):
        return K.Flatten()(K.Permute((3, 1, 2))(x) if x.shape[1:3] != (1, 1) else x)

    def dense(self, x, weight, bias):
        layer = K.Dense(weight.shape[0], use_bias=bias is not None)
        return self._with(layer, weight.T, *([] if bias is None else [bias]))(x)

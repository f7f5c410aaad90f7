"""Export the Keras/larq part of the collection through tf2onnx.

Needs Python 3.10, tensorflow-cpu 2.13, larq 0.13 and tf2onnx 1.16; not run by the tests.

    python -m tests.collection.make_tf               # from the repository root

The files are compared with ONNX Runtime by `test_oracle.py`, and with Keras here.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import larq
import numpy as np
import tensorflow as tf
import tf2onnx
from tensorflow.keras import layers

from tests.collection import exporting


@dataclass(frozen=True)
class Spec:
    """A Keras model, and what should be found in its export."""

    build: Callable[[], tf.keras.Model]
    name: str
    pattern: str
    binary: int | None
    float_: int | None
    opsets: tuple[int, ...]
    dynamic: bool
    domain: str
    notes: str
    quick: bool


SPECS: list[Spec] = []


def model(
    pattern: str,
    binary: int | None,
    float_: int | None,
    *,
    opsets: tuple[int, ...] = (15,),
    dynamic: bool = True,
    domain: str = "normal",
    notes: str = "",
    quick: bool = False,
) -> Callable:
    """Register the decorated function, which returns a Keras model."""

    def register(function: Callable) -> Callable:
        SPECS.append(
            Spec(
                function,
                function.__name__,
                pattern,
                binary,
                float_,
                opsets,
                dynamic,
                domain,
                notes,
                quick,
            )
        )
        return function

    return register


def conv(units: int, k: int = 3, **options) -> layers.Layer:
    """Return a larq convolution, ste_sign both ways, without bias, unless told otherwise."""
    common = {
        "input_quantizer": "ste_sign",
        "kernel_quantizer": "ste_sign",
        "kernel_constraint": "weight_clip",
        "use_bias": False,
        "padding": "same",
    }
    return larq.layers.QuantConv2D(units, k, **{**common, **options})


def dense(units: int, **options) -> layers.Layer:
    common = {"input_quantizer": "ste_sign", "kernel_quantizer": "ste_sign", "use_bias": False}
    return larq.layers.QuantDense(units, **{**common, **options})


def bn() -> layers.Layer:
    """Return BatchNormalization with gammas of both signs and settled statistics."""
    spread = tf.keras.initializers.RandomUniform(0.5, 3.0)
    signed = tf.keras.initializers.RandomUniform(-1.0, 1.5)
    beta, mean = (tf.keras.initializers.RandomNormal(stddev=0.5) for _ in range(2))
    return layers.BatchNormalization(
        gamma_initializer=signed,
        beta_initializer=beta,
        moving_mean_initializer=mean,
        moving_variance_initializer=spread,
    )


def image(size: int = 8, channels: int = 3) -> tf.Tensor:
    return layers.Input((size, size, channels))


def chain(x: tf.Tensor, *stages: layers.Layer) -> tf.keras.Model:
    y = x
    for stage in stages:
        y = stage(y)
    return tf.keras.Model(x, y)


def stem(units: int) -> layers.Layer:
    return tf.keras.Sequential([layers.Conv2D(units, 3, padding="same", use_bias=False), bn()])


@model("6 larq sequence: conv, BN (folded by tf2onnx)", 2, 2, opsets=(9, 13, 15, 18), quick=True)
def folded() -> tf.keras.Model:
    return chain(
        image(),
        stem(16),
        conv(16),
        bn(),
        conv(14),
        bn(),
        layers.GlobalAveragePooling2D(),
        layers.Dense(5),
    )


@model("6 first layer binary too", 2, 0, domain="zeros", notes="inputs may hold exact zeros")
def first_binary() -> tf.keras.Model:
    return chain(image(7, 5), conv(16), bn(), conv(14), bn())


@model("2,6 pad_values=1: Pad in NHWC", 2, 1)
def pad_values_one() -> tf.keras.Model:
    return chain(
        image(), stem(16), conv(16, pad_values=1.0), bn(), conv(14, pad_values=1.0, strides=2), bn()
    )


@model("6 SAME with stride 2: asymmetric pads", 2, 1)
def same_stride() -> tf.keras.Model:
    return chain(image(8), stem(16), conv(16, strides=2), bn(), conv(14, 4, strides=2), bn())


@model("6 valid padding, static batch", 2, 1, dynamic=False)
def valid() -> tf.keras.Model:
    return chain(
        image(8), stem(16), conv(16, padding="valid"), bn(), conv(14, padding="valid"), bn()
    )


@model("6 pool between conv and BN: BN stays", 2, 1)
def pool_between() -> tf.keras.Model:
    return chain(
        image(9), stem(14), conv(16), layers.MaxPool2D(2, padding="same"), bn(), conv(14), bn()
    )


@model("6 HWC flatten before binary Dense", 3, 1, quick=True)
def flatten_dense() -> tf.keras.Model:
    return chain(
        image(8),
        stem(12),
        conv(10, strides=2),
        bn(),
        layers.Flatten(),
        dense(16),
        bn(),
        dense(5),
        layers.Activation("softmax"),
    )


@model("6 padded pool, flatten, Dense with bias and scale", 2, 1)
def pool_flatten() -> tf.keras.Model:
    return chain(
        image(8),
        stem(12),
        conv(12),
        layers.MaxPool2D(3, 2, padding="same"),
        bn(),
        layers.Flatten(),
        dense(10, use_bias=True, bias_initializer="random_normal"),
    )


@model("6 residual in NHWC", 2, 2)
def residual() -> tf.keras.Model:
    x = image()
    y = stem(16)(x)
    for _ in range(2):
        y = layers.add([bn()(conv(16)(y)), y])
    return tf.keras.Model(x, layers.Dense(5)(layers.GlobalAveragePooling2D()(y)))


@model("6 QuickNet order: conv, relu, BN, add", 2, 2)
def quicknet() -> tf.keras.Model:
    x = image()
    y = stem(16)(x)
    for _ in range(2):
        y = layers.add(
            [
                bn()(
                    conv(16, pad_values=1.0, activation="relu", kernel_initializer="glorot_normal")(
                        y
                    )
                ),
                y,
            ]
        )
    y = layers.Activation("relu")(y)
    return tf.keras.Model(x, layers.Dense(5)(layers.GlobalAveragePooling2D()(y)))


@model("6 BinaryDenseNet: concat over the last axis", 2, 1)
def densenet() -> tf.keras.Model:
    x = image()
    y = stem(12)(x)
    for _ in range(2):
        y = layers.concatenate([y, conv(8, pad_values=-1.0 if _ else 1.0)(bn()(y))])
    return tf.keras.Model(x, bn()(y))


@model("6 depthwise and separable", 2, 1)
def depthwise() -> tf.keras.Model:
    return chain(
        image(),
        stem(20),
        larq.layers.QuantDepthwiseConv2D(
            3,
            padding="same",
            input_quantizer="ste_sign",
            depthwise_quantizer="ste_sign",
            use_bias=False,
        ),
        bn(),
        conv(33, 1),
        bn(),
    )


@model("6 approx_sign in, magnitude_aware_sign weights", 2, 1)
def magnitude_aware() -> tf.keras.Model:
    options = {"input_quantizer": "approx_sign", "kernel_quantizer": "magnitude_aware_sign"}
    return chain(image(), stem(16), conv(16, **options), bn(), conv(14, **options), bn())


@model("6 swish_sign, dilation", 2, 1)
def swish_sign() -> tf.keras.Model:
    options = {"input_quantizer": "swish_sign", "kernel_quantizer": "swish_sign"}
    return chain(
        image(), stem(16), conv(16, dilation_rate=2, **options), bn(), conv(14, **options), bn()
    )


@model("6 ste_heaviside: activations in {0,1}", 2, 1)
def heaviside() -> tf.keras.Model:
    return chain(
        image(),
        stem(16),
        conv(16, input_quantizer="ste_heaviside"),
        bn(),
        conv(14, input_quantizer="ste_heaviside"),
        bn(),
    )


@model("6 ste_tern weights: not binary", 0, 3)
def ternary() -> tf.keras.Model:
    return chain(
        image(),
        stem(16),
        conv(14, kernel_quantizer=larq.quantizers.SteTern(threshold_value=0.02)),
        bn(),
        layers.GlobalAveragePooling2D(),
        layers.Dense(5),
    )


@model("6 DoReFa activations of 2 bits (few-bit or float)", 0, 3)
def dorefa() -> tf.keras.Model:
    quantizer = larq.quantizers.DoReFa(k_bit=2, mode="activations")
    return chain(
        image(),
        stem(16),
        conv(16, input_quantizer=quantizer),
        bn(),
        conv(14, input_quantizer=quantizer),
        bn(),
    )


@model("6 tf.sign by a Lambda, explicit ZeroPadding2D", 2, 1, domain="zeros")
def lambda_sign() -> tf.keras.Model:
    options = {"input_quantizer": None, "padding": "valid"}
    return chain(
        image(),
        stem(16),
        layers.Lambda(tf.sign),
        layers.ZeroPadding2D(1),
        conv(16, **options),
        bn(),
        layers.Lambda(tf.sign),
        conv(14, **options),
        bn(),
    )


@model("6 where(x >= 0, 1, -1)", 2, 1)
def where_sign() -> tf.keras.Model:
    def act(x: tf.Tensor) -> tf.Tensor:
        return tf.where(x >= 0, tf.ones_like(x), -tf.ones_like(x))

    return chain(
        image(), stem(16), conv(16, input_quantizer=act), bn(), conv(14, input_quantizer=act), bn()
    )


@model("6 cast form: 2 * cast(x > 0) - 1, PReLU, average pool", 2, 1)
def cast_sign() -> tf.keras.Model:
    def act(x: tf.Tensor) -> tf.Tensor:
        return 2.0 * tf.cast(x > 0, tf.float32) - 1.0

    return chain(
        image(),
        stem(16),
        conv(16, input_quantizer=act),
        bn(),
        layers.PReLU(shared_axes=[1, 2], alpha_initializer="random_uniform"),
        layers.AveragePooling2D(),
        conv(14, input_quantizer=act),
        bn(),
    )


@model("6 clipped: hardtanh between, BN without scale", 2, 1)
def hardtanh() -> tf.keras.Model:
    clip = layers.Lambda(lambda x: tf.clip_by_value(x, -1.0, 1.0))
    return chain(
        image(),
        stem(16),
        clip,
        conv(16),
        layers.BatchNormalization(scale=False, beta_initializer="random_normal"),
        clip,
        conv(14),
    )


@model("0 nothing binary", 0, 3)
def float_net() -> tf.keras.Model:
    return chain(
        image(),
        stem(12),
        layers.ReLU(6.0),
        layers.Conv2D(12, 3, strides=2, padding="same", activation="swish"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(5, activation="softmax"),
    )


def main() -> None:
    """Export every model."""
    entries = []
    for spec in SPECS:
        tf.keras.backend.clear_session()
        tf.keras.utils.set_random_seed(zlib.crc32(spec.name.encode()) % 2**31)
        net = spec.build()
        shape = [None if spec.dynamic else 1, *net.input_shape[1:]]
        for opset in spec.opsets:
            signature = [tf.TensorSpec(shape, tf.float32, name="input_1")]
            name = f"tf_{spec.name}_{opset}"
            try:
                proto, _ = tf2onnx.convert.from_keras(net, input_signature=signature, opset=opset)
            except Exception as error:
                print(f"{name}: not exportable: {type(error).__name__}: {str(error)[:200]}")
                continue
            entries.append(
                exporting.write(
                    proto,
                    name=name,
                    exporter="tf2onnx",
                    pattern=spec.pattern,
                    binary=spec.binary,
                    float_=spec.float_,
                    domain=spec.domain,
                    batches=(1, 3) if spec.dynamic else (1,),
                    notes=spec.notes,
                    quick=spec.quick and opset == spec.opsets[-1],
                )
            )
            x = (
                np.random.default_rng(0)
                .standard_normal((1, *net.input_shape[1:]))
                .astype(np.float32)
            )
            np.savez(
                f"{os.environ['KERAS_OUT']}/{name}.npz", x=x, y=net(x).numpy()
            ) if "KERAS_OUT" in os.environ else None
    exporting.merge(entries, "tf_")


if __name__ == "__main__":
    main()

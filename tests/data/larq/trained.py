"""Networks of Larq's layers, converted by Larq Compute Engine."""

from __future__ import annotations

import larq as lq
import larq_compute_engine as lce
import numpy as np
import tensorflow as tf
from flat import edited

K = tf.keras.layers
BITS = {
    "input_quantizer": "ste_sign", "kernel_quantizer": "ste_sign", "use_bias": False,
    "kernel_constraint": "weight_clip",
}  # fmt: skip


def filled(model: tf.keras.Model, seed: int) -> tf.keras.Model:
    """Give the weights random values, as training would: scales of both signs among them."""
    rng = np.random.default_rng(seed)
    for layer in model.layers:
        values = []
        for weight in layer.weights:
            name, value = weight.name, rng.standard_normal(weight.shape).astype(np.float32)
            if "variance" in name:
                value = 0.5 + np.abs(value)
            elif "kernel" in name:
                value = value / np.sqrt(np.prod(weight.shape[:-1]))
            elif "gamma" in name:
                value[:2] = [0.0, -0.5][: len(value)]
            values.append(value)
        layer.set_weights(values)
    return model


def options() -> tf.keras.Model:
    """Return a network that makes the converter use all it has."""
    x = image = K.Input((12, 11, 3), batch_size=1)
    x = K.Conv2D(34, 3, padding="same", use_bias=False)(x)
    x = K.BatchNormalization()(x)
    conv = lq.layers.QuantConv2D
    # bits from layer to layer, padding by +1
    y = conv(40, 3, padding="same", pad_values=1.0, **BITS)(x)
    y = K.BatchNormalization()(y)
    # padding by 0, then an activation of its own, then an addition: floats
    y = conv(34, 3, padding="same", **BITS)(y)
    y = K.BatchNormalization()(y)
    x = K.Add()([x, y])
    # a fused activation in front of BatchNorm; pooling of bits
    y = conv(48, (3, 2), strides=(2, 1), padding="same", pad_values=1.0, activation="relu", **BITS)(
        x
    )
    y = K.BatchNormalization()(y)
    y = K.MaxPool2D(2, padding="same")(y)
    # no padding, dilation; float pooling in front of the next sign
    y = conv(32, 3, dilation_rate=1, padding="valid", **BITS)(y)
    z = K.BatchNormalization()(y)
    z = conv(33, (1, 3), padding="same", dilation_rate=(1, 2), pad_values=1.0, **BITS)(z)
    z = K.BatchNormalization()(z)
    y = K.Concatenate()([y, z])
    # a sign that is also read as a number
    s = lq.quantizers.SteSign()(y)
    y = conv(65, 1, kernel_quantizer="magnitude_aware_sign", use_bias=False)(s)
    y = K.Add()([y, s])
    y = K.GlobalAveragePooling2D()(y)
    y = lq.layers.QuantDense(20, **BITS)(y)
    y = K.BatchNormalization()(y)
    y = K.Dense(10)(y)
    return tf.keras.Model(image, K.Activation("softmax")(y))


def mnist() -> tf.keras.Model:
    """Return the network of Larq's first tutorial, smaller."""
    first = {k: v for k, v in BITS.items() if k != "input_quantizer"}
    return tf.keras.Sequential(
        [
            lq.layers.QuantConv2D(16, 3, input_shape=(14, 14, 1), batch_size=1, **first),
            K.MaxPooling2D(2),
            K.BatchNormalization(scale=False),
            lq.layers.QuantConv2D(32, 3, **BITS),
            K.BatchNormalization(scale=False),
            lq.layers.QuantConv2D(32, 3, **BITS),
            K.BatchNormalization(scale=False),
            K.Flatten(),
            lq.layers.QuantDense(32, **BITS),
            K.BatchNormalization(scale=False),
            lq.layers.QuantDense(10, **BITS),
            K.BatchNormalization(scale=False),
            K.Activation("softmax"),
        ]
    )


def glue() -> tf.keras.Model:
    """Return a network with TensorFlow Lite's float operators around binary layers."""
    x = image = K.Input((11, 9, 4), batch_size=1)
    x = K.Conv2D(8, 3, strides=2, padding="same", activation="relu6")(x)
    x = K.DepthwiseConv2D(3, strides=1, padding="same", depth_multiplier=2)(x)
    x = K.PReLU(shared_axes=[1, 2])(x)
    y = K.AveragePooling2D(3, 2, padding="same")(x)
    z = K.MaxPooling2D(3, 2, padding="same")(K.LeakyReLU(0.2)(x))
    x = K.Concatenate()([y, z])
    a, b = tf.split(x, 2, axis=-1)
    x = tf.concat([a * b, tf.nn.sigmoid(a) - tf.tanh(b)], -1)
    x = tf.pad(x, [[0, 0], [1, 1], [2, 1], [0, 0]], mode="REFLECT")
    x = tf.pad(x, [[0, 0], [0, 1], [1, 0], [0, 0]], constant_values=0.25)
    x = K.BatchNormalization()(x)
    y = lq.layers.QuantConv2D(32, 3, padding="same", pad_values=1.0, **BITS)(x)
    y = y[:, 1:-1:2, ::2, 3:]
    y = lq.layers.QuantDepthwiseConv2D(
        2, input_quantizer="ste_sign", depthwise_quantizer="ste_sign", use_bias=False
    )(K.BatchNormalization()(y))
    x = K.Conv2D(29, 3, strides=2, dilation_rate=1, activation="tanh")(x)
    m = tf.reduce_mean(x, [1, 2])
    n = tf.reduce_max(y, [1, 2])
    x = tf.nn.elu(m) + tf.nn.relu(n) * 0.5
    x = tf.nn.l2_normalize(x, -1)
    x = tf.reshape(tf.transpose(tf.reshape(x, [1, 29, 1]), [0, 2, 1]), [1, 29])
    x = tf.where(x > 0.0, x, tf.minimum(tf.maximum(x, -0.5), 0.1))
    return tf.keras.Model(image, K.Dense(5, activation="softmax")(x))


def keras() -> tf.keras.Model:
    """Return a network small enough to be stored twice, as tf2onnx writes it too."""
    x = image = K.Input((10, 9, 3), batch_size=1)
    x = K.Conv2D(8, 3, strides=2, padding="same")(x)
    y = lq.layers.QuantConv2D(16, 3, padding="same", **BITS)(x)
    y = K.BatchNormalization()(y)
    z = lq.layers.QuantConv2D(16, 3, padding="same", pad_values=1.0, **BITS)(y)
    z = K.BatchNormalization()(K.PReLU(shared_axes=[1, 2])(z))
    y = K.MaxPooling2D(2)(K.Add()([y, z]))
    y = lq.layers.QuantConv2D(12, 2, activation="relu", **BITS)(y)
    y = K.Flatten()(K.BatchNormalization()(y))
    return tf.keras.Model(image, lq.layers.QuantDense(6, **BITS)(y))


def write_onnx(path: str) -> None:
    """Write `keras` as tf2onnx does; it needs an environment that has it."""
    import tf2onnx

    tf2onnx.convert.from_keras(filled(keras(), 4), opset=13, output_path=path)


def converted(make, seed: int) -> tuple[bytes, bool]:
    return lce.convert_keras_model(filled(make(), seed)), False


def with_bits_out() -> tuple[bytes, bool]:
    """Return the first network, with its packed tensors as further outputs."""

    def change(model) -> None:
        graph = model.subgraphs[0]
        made = [k for o in graph.operators for k in o.outputs]
        bits = [k for k in made if graph.tensors[k].type == 2 and len(graph.tensors[k].shape) == 4]
        graph.outputs = [*graph.outputs, *bits]
        model.signatureDefs = None

    content, reference = converted(options, 1)
    return edited(content, change), reference


def dynamic_batch() -> tuple[bytes, bool]:
    """Return a network whose batch is only known when it runs."""

    def change(model) -> None:
        for tensor in model.subgraphs[0].tensors:
            if (
                tensor.shape is not None
                and len(tensor.shape) in (2, 4)
                and not _held(model, tensor)
            ):
                tensor.shapeSignature = [-1, *tensor.shape[1:]]

    content, reference = converted(mnist, 2)
    return edited(content, change), reference


def _held(model, tensor) -> bool:
    data = model.buffers[tensor.buffer].data
    return data is not None and len(data) > 0


CASES = {
    "options": with_bits_out,
    "mnist": dynamic_batch,
    "glue": lambda: converted(glue, 3),
    "keras": lambda: converted(keras, 4),
}

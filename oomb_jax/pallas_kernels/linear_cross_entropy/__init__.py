"""The loss of a language model's output layer, and its gradients, without all logits at once."""

from oomb_jax.pallas_kernels.linear_cross_entropy.api import linear_cross_entropy, linear_cross_entropy_vjp

__all__ = ["linear_cross_entropy", "linear_cross_entropy_vjp"]

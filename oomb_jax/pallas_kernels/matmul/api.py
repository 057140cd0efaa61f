"""The operation as models call it, and how the engine says which implementation runs."""

import dataclasses
import functools
from contextlib import AbstractContextManager
from typing import Any, Literal

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from oomb_jax.pallas_kernels.device import choose, multiprocessors, no_hopper
from oomb_jax.pallas_kernels.matmul.config import unsupported

Implementation = Literal["mosaic", "reference"]
"""`mosaic` needs a Hopper GPU; `reference` is XLA's product, on an NVIDIA GPU cuBLAS's."""

PRODUCT = "oomb_jax.matmul"
"""The name of the kernel's results, for policies of `jax.checkpoint`: they do not know it for a matrix product."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Setting:
    implementation: Implementation | None = "reference"
    spare: int = 0
    interpret: Any = None


_setting = jax.make_user_context(_Setting())
"""Part of what JAX knows a traced function by: what was traced outside is traced again inside."""


def products(
    implementation: Implementation | None, *, spare: int = 0, interpret: Any = None
) -> AbstractContextManager[None]:
    """How `matmul` computes in the functions that are traced inside, and in their gradients.

    Args:
      implementation: `"mosaic"` where the inputs allow it, `"reference"`, or None: the kernel where multiprocessors are
        to be spared. cuBLAS starts a program on each of them, and a few that are busy hold up the whole product.
      spare: multiprocessors that the kernel leaves to others.
      interpret: parameters of Pallas's interpreter, to run the kernel on a CPU.
    """
    return _setting(_Setting(implementation=implementation, spare=spare, interpret=interpret))


def matmul(x: Float[Array, "C I"], weight: Float[Array, "I O"]) -> Float[Array, "C O"]:
    """`x @ weight`, with float32 sums and one rounding to the dtype of the two, as `products` says; outside of it the
    reference. Where the kernel cannot take the operands, also `x @ weight`; on a GPU that is logged once.

    Raises:
      NotImplementedError: the kernel was named, and the device cannot run it.
    """
    setting = _setting.value
    if setting.implementation == "reference" or (setting.implementation is None and not setting.spare):
        return x @ weight
    missing = None if setting.interpret else no_hopper() or _too_small(setting.spare)
    if missing and setting.implementation == "mosaic":
        raise NotImplementedError(f"matmul='mosaic': {missing}; pass 'reference' or None")
    if choose("matmul", None, {"mosaic": missing or unsupported(x, weight)}) == "reference":
        return x @ weight
    return checkpoint_name(_matmul(x, weight, setting), PRODUCT)


def _too_small(spare: int) -> str | None:
    """Why the device has no multiprocessors to spare; None if it has."""
    count = multiprocessors()
    return None if spare <= count // 4 else f"{spare} of {count} multiprocessors are asked for"


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x, weight, setting: _Setting):
    return _product(x, weight, setting)


def _forward(x, weight, setting: _Setting):
    return _product(x, weight, setting), (x, weight)


def _backward(setting: _Setting, saved, dy):
    x, weight = saved
    return _product(dy, weight, setting, transpose_b=True), _product(x, dy, setting, transpose_a=True)


_matmul.defvjp(_forward, _backward)


def _product(a, b, setting: _Setting, *, transpose_a: bool = False, transpose_b: bool = False):
    from oomb_jax.pallas_kernels.matmul import mosaic

    programs = 2 if setting.interpret else multiprocessors() - setting.spare
    return mosaic.product(
        a, b, transpose_a=transpose_a, transpose_b=transpose_b, programs=programs, interpret=setting.interpret
    )


def reference(a, b, *, transpose_a: bool = False, transpose_b: bool = False):
    """What `mosaic.product` computes, by XLA."""
    return lax.dot_general(a, b, (((0 if transpose_a else 1,), (1 if transpose_b else 0,)), ((), ())))

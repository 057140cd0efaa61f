"""Page scores against the formula of their docstring, one query at a time.

One suite for every implementation. Where there is a Hopper GPU, the kernel runs on it: `JAX_PLATFORMS=cuda,cpu pytest
tests/pallas_kernels`.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races  # there is no public name
from jax.experimental.pallas import mosaic_gpu as plgpu

from oomb_jax.pallas_kernels import device
from oomb_jax.pallas_kernels.page_score import mosaic, page_scores, reference
from tests.tolerance import F64_GRADIENT, PAGE_SCORE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    C: int
    M: int
    G: int
    H: int
    end: int
    starts: tuple[int, ...]
    """Of each row; from `end` on: no candidates."""
    spare: int = 3
    """Pages from `end` on, which hold NaN."""
    scaled: bool = False
    dtype: str = "bfloat16"


SMALL = (
    Case(C=8, M=1, G=1, H=8, end=1, starts=(0,)),
    Case(C=24, M=2, G=3, H=8, end=21, starts=(0, 20, 21), scaled=True),
    Case(C=20, M=3, G=7, H=4, end=0, starts=(0, 0), spare=5),
)
MOSAIC = (
    Case(C=128, M=1, G=2, H=64, end=70, starts=(0, 67)),
    Case(C=192, M=2, G=3, H=64, end=291, starts=(3, 150, 291), scaled=True, dtype="float16"),
    Case(C=256, M=2, G=1, H=128, end=300, starts=(0, 299), spare=0),
    Case(C=128, M=1, G=7, H=128, end=128, starts=(0,)),
    Case(C=128, M=1, G=1, H=64, end=0, starts=(0, 0)),
)
GPU = (
    *MOSAIC,
    Case(C=4096, M=4, G=7, H=128, end=8192 - 5, starts=tuple(range(0, 8192, 256)), spare=9),
    Case(C=4096, M=2, G=7, H=64, end=4096, starts=(0,) * 64),
    Case(C=1024, M=8, G=4, H=128, end=1000, starts=(0,) * 8, scaled=True),
)


def inputs(case):
    rng = np.random.default_rng(case.end)
    draw = lambda *shape, scale: jnp.asarray(rng.normal(size=shape) * scale, case.dtype)
    representatives = draw(case.end + case.spare, case.M, case.H, scale=1).at[case.end :].set(jnp.nan)
    return (
        *(draw(case.C, case.M * case.G, case.H, scale=2 / np.sqrt(case.G * case.H)), representatives),
        *(jnp.asarray(case.starts, jnp.int32), jnp.int32(case.end), jnp.asarray(rng.random(case.C) < 0.8)),
    )


def by_definition(q, representatives, starts, end, votes, *, scaled):
    """float64. The sum of a group's queries is rounded to their dtype, as in every implementation."""
    (C, N, H), (P, M, _), dtype = q.shape, representatives.shape, q.dtype
    exact = lambda x: np.asarray(x).astype(np.float64)
    representatives, votes, end = exact(representatives), np.asarray(votes), int(end)
    summed = exact(q).reshape(C, M, N // M, H).sum(axis=2)
    summed = summed if dtype == jnp.float64 else exact(jnp.asarray(summed, "float32").astype(dtype))
    scores = np.zeros((len(starts), M, P))
    for r, start in enumerate(np.asarray(starts)):
        for i in np.arange(C).reshape(len(starts), -1)[r][votes.reshape(len(starts), -1)[r]]:
            logits = np.einsum("mh,pmh->mp", summed[i], representatives[start:end]) / (np.sqrt(H) if scaled else 1)
            weights = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
            scores[r, :, start:end] += weights / weights.sum(axis=1, keepdims=True)
    return scores


class Suite:
    scores = staticmethod(page_scores)

    def check(self, case, tolerance):
        x = inputs(case)
        scores = jax.jit(functools.partial(self.scores, scaled=case.scaled))(*x)
        np.testing.assert_allclose(scores, by_definition(*x, scaled=case.scaled), rtol=tolerance, atol=1e-30)


class TestReference(Suite):
    @pytest.mark.parametrize("case", SMALL, ids=str)
    def test_scores_are_those_of_the_formula(self, case):
        with jax.enable_x64(True):
            self.check(dataclasses.replace(case, dtype="float64"), F64_GRADIENT)

    @pytest.mark.parametrize("case", SMALL[1:2], ids=str)
    def test_products_are_summed_in_float32(self, case):
        self.check(case, PAGE_SCORE)


class TestMosaicInterpreted(Suite):
    scores = staticmethod(functools.partial(mosaic.page_scores, interpret=plgpu.InterpretGPUParams()))

    @pytest.mark.parametrize("case", MOSAIC, ids=str)
    def test_scores_are_those_of_the_formula(self, case):
        self.check(case, PAGE_SCORE)

    def test_nothing_races(self):
        x = inputs(MOSAIC[2])
        scores = functools.partial(mosaic.page_scores, interpret=plgpu.InterpretGPUParams(detect_races=True))
        jax.block_until_ready(jax.jit(functools.partial(scores, scaled=False))(*x))
        assert not get_races().races_found


HOPPER = jax.default_backend() == "gpu" and jax.devices()[0].compute_capability.startswith("9.")


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
class TestMosaic(Suite):
    scores = staticmethod(functools.partial(page_scores, implementation="mosaic"))

    @pytest.mark.parametrize("case", GPU, ids=str)
    def test_scores_are_those_of_the_formula(self, case):
        self.check(case, PAGE_SCORE)

    def test_two_calls_give_the_same_bits(self):
        x = inputs(GPU[-3])
        first, second = (self.scores(*x) for _ in range(2))
        assert (first == second).all()


def test_wrong_arguments_are_refused():
    q, representatives, starts, end, votes = inputs(SMALL[1])
    with pytest.raises(ValueError, match="N a multiple of M"):
        page_scores(q[:, :5], representatives, starts, end, votes)
    with pytest.raises(ValueError, match="24 queries in 5 rows"):
        page_scores(q, representatives, jnp.zeros(5, jnp.int32), end, votes)
    with pytest.raises(NotImplementedError, match="'mosaic': head width 8"):
        page_scores(q, representatives, starts, end, votes, implementation="mosaic")


def test_the_kernel_runs_where_it_can(monkeypatch, caplog):
    x = inputs(MOSAIC[0])
    ran = []

    def kernel(*arguments, **options):
        ran.append(True)
        return reference.page_scores(*arguments, **options)

    monkeypatch.setattr(mosaic, "page_scores", kernel)
    caplog.set_level("INFO")
    device._log_once.cache_clear()
    page_scores(*x)
    assert not ran
    assert not caplog.messages
    hopper = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(device, "current_device", lambda: hopper)
    page_scores(*x)
    page_scores(*x, implementation="reference")
    page_scores(*(t.astype("float32") if i < 2 else t for i, t in enumerate(x)))
    assert len(ran) == 1
    refused = "page scores: reference; not mosaic: queries of float32, where the kernel takes bfloat16 or float16"
    assert caplog.messages == ["page scores: mosaic", refused]

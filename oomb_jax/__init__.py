"""Train large language models on sequences of millions of tokens on one GPU."""

from oomb_jax import models as models
from oomb_jax.chunked import token_losses as token_losses
from oomb_jax.chunked import value_and_grad as value_and_grad
from oomb_jax.compiler import COMPILER_OPTIONS as COMPILER_OPTIONS
from oomb_jax.config import Config as Config
from oomb_jax.config import Dense as Dense
from oomb_jax.full_attention import full_attention_value_and_grad as full_attention_value_and_grad
from oomb_jax.pallas_kernels.matmul import matmul as matmul
from oomb_jax.pools import Pools as Pools
from oomb_jax.pools import create_pools as create_pools
from oomb_jax.selection import TopK as TopK

"""`value_and_grad` with optax: the model learns one random sequence by heart."""

import jax
import jax.numpy as jnp
import optax

import oomb_jax

config = oomb_jax.Config(chunk=256, page=64)
optimizer = optax.adam(3e-3)


@jax.jit(donate_argnames=("model", "state", "pools"), compiler_options=oomb_jax.COMPILER_OPTIONS)
def step(model, state, pools, tokens, labels):
    loss, grads, pools = oomb_jax.value_and_grad(model, pools, tokens, labels, config)
    updates, state = optimizer.update(grads, state, model)
    return optax.apply_updates(model, updates), state, pools, loss


model = oomb_jax.models.create("tiny", key=jax.random.key(0), dtype=jnp.float32)
state = jax.jit(optimizer.init)(model)
tokens = jax.random.randint(jax.random.key(1), (1000,), 0, 256, jnp.int32)
labels = jnp.roll(tokens, -1).at[-1].set(-100)  # the next token; nothing follows the last one
pools = oomb_jax.create_pools(model, len(tokens), config)
for _ in range(10):
    model, state, pools, loss = step(model, state, pools, tokens, labels)
    print(f"loss {loss:.4f}")

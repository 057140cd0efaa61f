"""`value_and_grad` with optax: gradient descent on one sequence of random tokens, which the model learns by heart."""

import jax
import jax.numpy as jnp
import optax

import oomb_jax

config = oomb_jax.Config(chunk=256, page=64)
model = oomb_jax.models.create("tiny", key=jax.random.key(0), dtype=jnp.float32)
tokens = jax.random.randint(jax.random.key(1), (1000,), 0, 256)
labels = jnp.roll(tokens, -1).at[-1].set(-100)  # the next token; nothing follows the last one
pools = oomb_jax.create_pools(model, len(tokens), config)
optimizer = optax.adam(3e-3)
state = optimizer.init(model)
value_and_grad = jax.jit(oomb_jax.value_and_grad, static_argnames="config", donate_argnames="pools")
for _ in range(10):
    loss, grads, pools = value_and_grad(model, pools, tokens, labels, config)
    updates, state = optimizer.update(grads, state, model)
    model = optax.apply_updates(model, updates)
    print(f"loss {loss:.4f}")

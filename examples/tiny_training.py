"""Trains the tiny model on the text of Python's standard library: data, model, gradient, optimizer, held-out loss.

    python examples/tiny_training.py

This is the inside of `python -m oomb_jax.train`, without its checkpoints, metrics and plots. Half a minute on one core.
"""

import jax
import jax.numpy as jnp
import optax

import oomb_jax
from oomb_jax.train import data

STEPS = 40
CONTEXT = 2048


def main() -> None:
    text = data.open_data("stdlib")
    config = oomb_jax.Config(chunk=512)
    model = oomb_jax.models.create("tiny", key=jax.random.key(0), dtype=jnp.float32)
    data.check_vocabulary(text, model.config.vocab_size)
    pools = oomb_jax.create_pools(model, CONTEXT, config)

    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, warmup_steps=5, decay_steps=STEPS))
    state = jax.jit(optimizer.init)(model)

    # The pools are donated: a step updates them in place and hands them on.
    value_and_grad = jax.jit(oomb_jax.value_and_grad, static_argnames="config", donate_argnames="pools")
    token_losses = jax.jit(oomb_jax.token_losses, static_argnames="config", donate_argnames="pools")

    @jax.jit
    def update(model, grads, state):
        updates, state = optimizer.update(grads, state, model)
        return optax.apply_updates(model, updates), state

    assert text.heldout is not None  # open_data holds 5 % of the documents out unless told otherwise
    heldout = data.evaluation_batch(text.heldout, index=0, batch=4, ctx=CONTEXT)

    def heldout_loss(model, pools):
        losses, pools = token_losses(model, pools, heldout.tokens, heldout.labels, config)
        return float(losses.sum()) / (heldout.labels >= 0).sum(), pools

    first, pools = heldout_loss(model, pools)
    print(f"held-out loss before {first:.3f}")
    for step in range(STEPS):
        batch = data.sample(text.train, seed=0, step=step, batch=1, ctx=CONTEXT)
        loss, grads, pools = value_and_grad(model, pools, batch.tokens, batch.labels, config)
        model, state = update(model, grads, state)
        if step % 5 == 0:
            print(f"step {step:3d}  loss {loss:.3f}")
    last, pools = heldout_loss(model, pools)
    print(f"held-out loss after {last:.3f}")
    assert last < first - 1, "the model has not learned"


if __name__ == "__main__":
    main()

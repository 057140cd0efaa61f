"""`python -m oomb_jax.plan`: how far common machines go, as a table for docs/plan.md."""

import tyro

from oomb_jax import models
from oomb_jax.plan.machine import DEVICES, named
from oomb_jax.train.config import TrainConfig
from oomb_jax.train.plan import decide, longest_context

HOSTS = (64, 128, 256, 512)

LEAST = {
    "optimizer": "adafactor",
    "master": "stochastic",
    "grad_dtype": "bfloat16",
    "kv_grad_dtype": "bfloat16",
    "remat": "full",
}

# What a run takes by default, and the least that trains every parameter.
SETTINGS = {
    "AdamW, float32 masters and sums": {"kv_dtype": "bfloat16"},
    "Adafactor, stochastic rounding, bfloat16 sums, remat full": LEAST | {"kv_dtype": "bfloat16"},
    "The same with keys and values in float8": LEAST | {"kv_dtype": "float8_e4m3fn"},
}


def main(models_: tuple[str, ...] = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b")) -> None:
    """Prints the longest context of each model, GPU and host memory, with Top-K attention and offload auto."""
    for title, more in SETTINGS.items():
        print(f"{title}:\n")
        print(f"| model | GPU | {' | '.join(f'{host} GiB' for host in HOSTS)} |")
        print("|---|---|" + "---|" * len(HOSTS))
        for model in models_:
            for device in DEVICES:
                cells = [_cell(model, device, host, more) for host in HOSTS]
                print(f"| {model} | {device} | {' | '.join(cells)} |")
        print()


def _cell(model: str, device: str, host: int, more: dict) -> str:
    # Room for the gradients of all pages: it depends on the text whether less suffices.
    settings = TrainConfig(model=model, implementation="mosaic", save_every=0, kv_grad_pages=2**30, **more)
    context = longest_context(decide(settings, named(device, host), models.config(model)))
    return f"{context:,}" if context else "none"


if __name__ == "__main__":
    tyro.cli(main)

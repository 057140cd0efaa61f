"""Make the golden files `tests/golden/qwen2_*`: what `transformers` computes in float32 for tiny random Qwen2 models.

    pip install torch transformers safetensors numpy
    python tests/make_qwen2_golden.py

Each directory holds a model as `save_pretrained` writes it and `expected.safetensors`: `input_ids` [2, 48], `logits`,
the `loss` over next tokens and `grad.NAME` for every parameter. `qwen2_untied` also has `logits.ROPE` of its first
sequence under each rope scaling in `ropes.json`, an addition to its `config.json`.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

GOLDEN = Path(__file__).parent / "golden"
TRAINED, TOKENS = 24, 48

COMMON = {
    "vocab_size": 97,
    "num_hidden_layers": 2,
    "intermediate_size": 56,
    "max_position_embeddings": TRAINED,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,  # far from zero, so that every operation shows in the logits
}
MODELS = {
    # Three query heads to a key/value head.
    "qwen2_untied": {
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
    # Seven to one, and heads whose total width is not that of the model.
    "qwen2_tied": {
        **{"hidden_size": 40, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 8},
        **{"tie_word_embeddings": True, "rope_theta": 1e6},
    },
}
YARN = {"factor": 4.0, "original_max_position_embeddings": TRAINED}
ROPES = {
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "rope_theta": 5e3},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.5}},
    "yarn": {"rope_scaling": {"type": "yarn", **YARN}, "rope_theta": 2e4},
    "yarn_options": {
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 2e3, "factor": 4.0, "original_max_position_embeddings": 4096},
            **{"beta_fast": 4.0, "beta_slow": 0.25, "mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False},
        }
    },
    "yarn_lone_mscale": {"rope_scaling": {"type": "yarn", **YARN, "mscale": 0.5}},
    "yarn_attention_factor": {"rope_parameters": {"rope_type": "yarn", **YARN, "attention_factor": 1.3}},
}


def forward(model: Qwen2ForCausalLM, tokens: torch.Tensor):
    return model(input_ids=tokens, labels=tokens, use_cache=False)


def make(name: str, settings: dict) -> None:
    torch.manual_seed(0)
    directory = GOLDEN / name
    model = Qwen2ForCausalLM(Qwen2Config(**COMMON, **settings)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases start at zero and norms at one
                parameter += 0.2 * torch.randn_like(parameter)
    tokens = torch.randint(0, COMMON["vocab_size"], (2, TOKENS))
    result = forward(model, tokens)
    result.loss.backward()
    expected = {"input_ids": tokens.int(), "logits": result.logits.detach(), "loss": result.loss.detach()}
    expected |= {f"grad.{parameter}": value.grad for parameter, value in model.named_parameters()}
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink()
    if name == "qwen2_untied":
        for rope, change in ROPES.items():
            expected[f"logits.{rope}"] = rope_logits(model, {**COMMON, **settings, **change}, tokens[:1])[0]
        (directory / "ropes.json").write_text(json.dumps(ROPES, indent=2) + "\n")
    save_file(expected, directory / "expected.safetensors")


@torch.no_grad()
def rope_logits(model: Qwen2ForCausalLM, settings: dict, tokens: torch.Tensor) -> torch.Tensor:
    # A copy: the configuration takes the dictionary apart.
    scaled = Qwen2ForCausalLM(Qwen2Config(**json.loads(json.dumps(settings)))).float()
    scaled.load_state_dict(model.state_dict())
    return forward(scaled, tokens).logits


if __name__ == "__main__":
    for name, settings in MODELS.items():
        make(name, settings)

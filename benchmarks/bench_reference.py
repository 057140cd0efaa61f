"""Speed and memory of the authors' PyTorch implementation, by its own efficiency test, offline, with random weights.

    git clone https://github.com/wenhaoli-xmu/OOMB ../OOMB
    python benchmarks/bench_reference.py --repository ../OOMB --method test_efficiency/config_blockwise_sparse.json \\
        --page-budget 64 --cpu-offload none --context 65536 --warmup 16384 | tee topk.log
    python benchmarks/bench_reference.py --repository ../OOMB --method test_efficiency/config_blockwise.json \\
        --cpu-offload none --context 65536 --warmup 8192 | tee dense.log
    python -m oomb_jax.compare efficiency topk.log dense.log benchmarks/results/step.json

The first two run on one GPU, in an environment with torch, triton, transformers, accelerate, matplotlib and pygments;
JAX is not needed. What runs and is timed is `launch_test` of the clone's test_efficiency/test.py: forward and backward
of one sequence, without an optimizer. Put in from here, before the clock starts:

- random bfloat16 weights of Qwen2.5-7B's shape where the test loads a model, and no tokenizer;
- random ids from a stand-in for `corpus`, and an empty `profiler`: packages that the authors have not published;
- the model's rotary embedding in every attention, where Top-K looks for it; transformers has none there since 4.48.

For each context the test prints its line, `step-1 | loss: 0.000 | avg time: ...`, always with that loss. Its clock
stops when the last kernel is launched; its memory is the allocator's peak since the program began. A line of JSON
follows, with the seconds until the GPU is done, too. The warm-up comes first and compiles the kernels: its line says
`warm-up time`, lest a reader of logs take it for a result, and has no JSON. In the test a sequence repeats the shorter
one before it, and gradients add up, the warm-up's too. The last line tells whether all exist and are finite.
"""

# argparse, as their environment has no tyro.
import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SHAPE = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
}
"""Qwen2.5-7B, in the words of transformers."""


def settings() -> tuple[argparse.Namespace, dict[str, Any]]:
    """The command line, and the method file with what it changes there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--repository", type=Path, required=True, help="a clone of github.com/wenhaoli-xmu/OOMB")
    add("--method", required=True, help="a method file, absolute or below the repository")
    add("--context", type=int, nargs="+", default=[65536], help="tokens of a sequence; several must rise")
    add("--warmup", type=int, default=16384, help="tokens of the warm-up, two chunks more than Top-K chooses; 0: none")
    add("--iterations", type=int, help="how often a context is timed; the test does 2 below 65536 tokens, else 1")
    add("--layers", type=int, default=SHAPE["num_hidden_layers"], help="fewer, to try it out")
    layers = lambda text: None if text == "none" else int(text)
    add("--page-budget", type=int, default=argparse.SUPPRESS, help="pages to choose, in place of the method file's")
    add("--cpu-offload", type=layers, default=argparse.SUPPRESS, help="in place of the method file's; none: no offload")
    args = parser.parse_args()

    args.repository = args.repository.resolve()
    if not (args.repository / "test_efficiency/test.py").is_file():
        parser.error(f"--repository {args.repository}: no test_efficiency/test.py there, so it is no clone of OOMB")
    lengths = [args.warmup, *args.context]
    if lengths != sorted(lengths):
        parser.error(f"--warmup, --context: {lengths} must rise: the memory is the peak since the program began")
    method = json.loads((args.repository / args.method).read_text(encoding="utf-8"))
    changes = {key: value for key, value in vars(args).items() if key in ("page_budget", "cpu_offload")}
    if unknown := sorted(changes.keys() - method.keys()):
        parser.error(f"--method {args.method} has no {' and no '.join(unknown)} to change")
    return args, method | changes


def commit(repository: Path) -> str:
    """What is checked out; `unknown` where there is no clone, or no git."""
    command = ["git", "-C", str(repository), "--git-dir", ".git", "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def random_model(layers: int) -> Any:
    """Qwen2 on the GPU, in bfloat16, as transformers initialises it."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE | {"num_hidden_layers": layers}))
    torch.set_default_dtype(torch.float32)
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb
    return model


def stand_ins() -> dict[str, Any]:
    """For the packages that are not published."""
    import torch

    def length(path, tokenizer):
        return json.loads(Path(path).read_text(encoding="utf-8"))["truncation"]["max_tokens"]

    def texts(data, length, max_instance, use_cache):
        ids = torch.randint(SHAPE["vocab_size"], (length,), generator=torch.Generator().manual_seed(1))
        return [{"input_ids": ids.tolist()}] * max_instance

    corpus = SimpleNamespace(get_processor=length, LazyRandomSampleCorpus=texts)
    return {"corpus": corpus, "profiler": SimpleNamespace(WallTime=None)}  # imported there, not used


def watched(base: Any, record: dict[str, Any], warmup: bool) -> Any:
    """The test's `History`, of which it makes one for each context, with what this program tells besides."""
    import torch

    class History(base):
        warming = warmup

        def __init__(self, *args):
            super().__init__(*args)
            self.synchronized = []

        def step(self, *args):
            super().step(*args)  # the test's time and memory
            torch.cuda.synchronize()
            self.synchronized.append(time.time() - self._start)

        def summary(self, *args):
            if History.warming:
                self.template = self.template.replace("avg time", "warm-up time")
            seconds, mib = super().summary(*args)
            if not History.warming:
                figures = {
                    "context": self.seq_len[-1],
                    "iterations": len(self.time),
                    "seconds": round(float(seconds), 4),
                    "synchronized_seconds": round(statistics.fmean(self.synchronized), 4),
                    "peak_gib": round(mib / 1024, 4),
                }
                print(json.dumps(record | figures), flush=True)
            History.warming = False
            return seconds, mib

    return History


def main() -> None:
    """Measures and prints."""
    args, method = settings()
    try:
        import torch
    except ImportError:
        sys.exit("There is no PyTorch here: run this in an environment for OOMB, as the head of this file says.")
    import transformers
    import triton

    os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    os.environ["HF_ACCESS_TOKEN"] = "none"  # is asked for, and not used
    os.chdir(args.repository)  # its files name each other from there
    sys.path.insert(0, str(args.repository))
    sys.modules.update(stand_ins())
    from chunkoptim import utils
    from test_efficiency import test

    name = method["method"]
    record = {
        "commit": commit(args.repository),
        "gpu": torch.cuda.get_device_name(0),
        **{module.__name__: module.__version__ for module in (torch, triton, transformers)},
        "method": name,
        "settings": {key: value for key, value in method.items() if key != "method"},
        "layers": args.layers,
        "warmup": args.warmup,
    }

    model = random_model(args.layers)
    utils.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *_, **__: None)
    utils.AutoModelForCausalLM = SimpleNamespace(from_pretrained=lambda *_, **__: model)
    test.History = watched(test.History, record, args.warmup > 0)
    test.range = lambda count: range(1 if test.History.warming else args.iterations or count)  # of its one loop
    environment = test.get_env_conf("test_efficiency/model.json")
    environment["model"]["model_method"] = name
    pipeline = getattr(test, name.replace("-tp", "_tensor_parallel").replace("-", "_"))
    options = SimpleNamespace(env_conf=environment, context=str([x for x in (args.warmup, *args.context) if x]))
    test.launch_test(options, partial(pipeline, **record["settings"]))

    gradients = [x.grad for x in model.parameters() if x.grad is not None]
    missing = sum(x.grad is None for x in model.parameters())
    infinite = sum(not x.isfinite().all().item() for x in gradients)
    print(json.dumps({"gradients": len(gradients), "missing": missing, "not_finite": infinite}))


if __name__ == "__main__":
    main()

"""The meshes of examples/models/ on 8 to 64 GPUs: examples/models/README.md.

Each plan is what ``lightning-wlb plan --mesh auto`` finds for the model of a YAML there, with its
window and micro-batches, on documents of Generator A: **simulated**, profile h100-fa2. No model has
been run.

    python -m benchmarks.model_plans              # 20 minutes of a core; goes on where it stopped
    python -m benchmarks.model_plans --models qwen3_8b --devices 8 --output FILE

Prints one JSON object as its last line.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import yaml

from benchmarks import report
from lightning_wlb.cli.main import main as lightning_wlb

MODELS = Path(__file__).parents[1] / "examples/models"
RESULT = Path(__file__).with_name("results") / "model_plans.json"
DEVICES = (8, 16, 32, 64)
HEAD = """# Eight models, and their plans

Made by `python -m benchmarks.model_plans`; do not edit. **No model here has been run.** Each YAML
has the published sizes of its model, so that nothing is downloaded; a test parses and plans it.
Weights come from a folder: `--model.init_args.config FOLDER --model.init_args.pretrained true`.

The plans are **simulated**, profile h100-fa2 (H100 SXM5 80GB, attention by torch's
FlashAttention-2; published figures, not measured): the fastest mesh (data, pipeline, context,
tensor; ×v: v virtual stages) for documents of Generator A, a window of {context_window} tokens,
{micro_batches} micro-batches' worth of tokens a step, packing `auto`, nodes of 8. *Gain* is
tokens/s over `best_fit` on its own best mesh. A run without sizes searches for its mesh by itself;
the same search before it:

```
lightning-wlb plan --model examples/models/llama3_1_8b.yaml --mesh auto --devices 16 \\
    --devices-per-node 8 --lengths generator-a --long-documents split \\
    --context-window {context_window} --micro-batches {micro_batches} --profile {profile}
```

| Model | GPUs | Mesh | Tokens/s | Memory (GB) | Recomputed | Gain |
|---|---:|---|---:|---:|---:|---:|
"""


def settings_of(model: str) -> dict[str, Any]:
    """Window and micro-batches of a YAML."""
    data = yaml.safe_load((MODELS / f"{model}.yaml").read_text())["data"]
    return {name: data[name] for name in ("context_window", "micro_batches", "profile")}


def plan(model: str, devices: int) -> dict[str, Any]:
    """The figures of the best mesh, or under ``does_not_fit`` what the search says.

    Raises:
        RuntimeError: the search has failed for another reason.
    """
    settings = settings_of(model)
    command = [
        *("plan", "--model", str(MODELS / f"{model}.yaml"), "--mesh", "auto", "--json"),
        *("--devices", str(devices), "--devices-per-node", "8", "--lengths", "generator-a"),
        *("--long-documents", "split", "--profile", settings["profile"]),
        *("--context-window", str(settings["context_window"])),
        *("--micro-batches", str(settings["micro_batches"])),
    ]
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = lightning_wlb(command)
    if code != 0:
        if "can run this" not in error.getvalue():
            raise RuntimeError(f"{model} on {devices} was not planned: {error.getvalue()}")
        return {"does_not_fit": error.getvalue().strip()}
    found = json.loads(out.getvalue().splitlines()[-1])
    best, reference = found["rows"][0], found["best_fit"]
    kept = ("mesh", "tokens_per_second", "peak_bytes", "recomputed", "step_ms")
    gain = reference and best["tokens_per_second"] / reference["tokens_per_second"]
    return {name: best[name] for name in kept} | {"gain": gain}


def row(model: str, devices: int, found: dict[str, Any]) -> str:
    """A line of the table."""
    name = f"[{model}.yaml]({model}.yaml)"
    if "does_not_fit" in found:
        return f"| {name} | {devices} | does not fit | | | | |"
    sizes = [found["mesh"][axis] for axis in ("data", "pipeline", "context", "tensor")]
    virtual = found["mesh"]["virtual_stages"]
    mesh = ",".join(map(str, sizes)) + (f" ×{virtual}" if virtual > 1 else "")
    gain = f"{found['gain']:.2f}" if found["gain"] else "`best_fit` does not fit"
    return (
        f"| {name} | {devices} | {mesh} | {found['tokens_per_second']:,.0f} |"
        f" {found['peak_bytes'] / 1e9:.0f} | {found['recomputed']:.0%} | {gain} |"
    )


def main(argv: list[str] | None = None) -> None:
    """Plan what the result lacks, and write page and result."""
    models = sorted(path.stem for path in MODELS.glob("*.yaml"))
    made = report.parser("model_plans", __doc__)
    made.add_argument("--models", nargs="+", choices=models, default=models)
    made.add_argument("--devices", nargs="+", type=int, default=list(DEVICES))
    made.add_argument("--output", type=Path, default=RESULT)
    given = made.parse_args(argv)
    plans = json.loads(given.output.read_text())["plans"] if given.output.exists() else {}
    for model in given.models:
        for devices in given.devices:
            if str(devices) not in plans.setdefault(model, {}):
                plans[model][str(devices)] = plan(model, devices)
                result = json.dumps({"script": "model_plans", "plans": plans})
                given.output.write_text(result + "\n")
    if given.output == RESULT:
        settings = settings_of(models[0])
        text = HEAD.format(**settings)
        lines = [
            row(name, int(n), each) for name in sorted(plans) for n, each in plans[name].items()
        ]
        (MODELS / "README.md").write_text(text + "\n".join(lines) + "\n")
    print(json.dumps({"script": "model_plans", "plans": plans}))


if __name__ == "__main__":
    main()

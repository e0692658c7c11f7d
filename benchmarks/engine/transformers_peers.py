"""What transformers' `generate` does with the same weights and prompts: plain, prompt lookup, and an assistant model.

Models are built from our own tensors (a GGUF file's dequantised ones, or a folder's), so nothing is fetched and both
sides run the same numbers. Batch 1, greedy, sdpa, end marks ignored. Decode time runs from the end of the first round,
which holds every prefill, the assistant's included; tokens are counted from there, too. Lookup and assistant run with
transformers' default lengths. --static adds plain decoding with a static cache, which transformers compiles by itself
on a GPU. --dry: tiny, on the CPU, unrecorded.

    python3 benchmarks/engine/transformers_peers.py --model FILE.gguf --assistant SMALL.gguf --prompts prompts.npz \\
        --out benchmarks/results/engine.json
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
from _bench import record
from _engine_bench import close, complete, save, script, synchronize
from prompts import given, tokenizer_of

from specdial.engine.models.tensors import ignorable
from specdial.engine.weights.gguf_header import GgufFile
from specdial.engine.weights.gguf_model import GgufWeights, gguf_config
from specdial.engine.weights.hf import SafetensorsWeights, read_config
from specdial.policies.errors import UserError

LOOKUP_TOKENS = 10
CONFIGS = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}


def hf_model(source, device, dtype):
    """The transformers model of a .gguf file or a Hugging Face folder, from our loader's tensors."""
    path = Path(source)
    if path.is_dir():
        config, weights = read_config(path, path.name), SafetensorsWeights(path)
    else:
        file = GgufFile(path)
        config = gguf_config(file)
        weights = GgufWeights(file, config, dtype)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            hf_config(config), dtype=dtype, attn_implementation="sdpa"
        )
    given = {name: weights[name] for name in weights if not ignorable(name, config)}
    missing, unexpected = model.load_state_dict(given, strict=False)
    if unexpected or set(missing) - ({"lm_head.weight"} if config.tied_embeddings else set()):
        raise UserError(f"{source}: tensors {missing} missing, {unexpected} unexpected", "give a complete model")
    model.generation_config.eos_token_id = None
    return model.to(device).eval()


def hf_config(c):
    """transformers' config of ours. Raises UserError for a scaled rotary embedding."""
    if c.rope.kind != "default":
        raise UserError(f"{c.name}: RoPE scaling {c.rope.kind} is not translated", "use a model without it")
    return CONFIGS[c.architecture](
        vocab_size=c.vocab,
        hidden_size=c.hidden,
        intermediate_size=c.intermediate,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_context_tokens,
        rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        tie_word_embeddings=c.tied_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **({"sliding_window": None} if c.architecture == "mistral" else {}),
    )


class FirstRound(transformers.StoppingCriteria):
    """Stops nothing: `generate` calls it after every round, and it notes when the first one was over."""

    def __init__(self):
        self.over_s, self.length = 0.0, 0

    def __call__(self, input_ids, scores, **_):
        if not self.length:
            synchronize(input_ids.device)
            self.over_s, self.length = time.perf_counter(), input_ids.shape[1]
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@torch.inference_mode()
def generated(model, prompt, new_tokens, extra):
    """New tokens of one prompt; how many came after the first round, and the seconds those took."""
    ids = torch.tensor([prompt], device=model.device)
    first = FirstRound()
    out = model.generate(
        ids,
        stopping_criteria=[first],
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        **extra,
    )
    synchronize(model.device)
    return out[0, len(prompt) :].tolist(), out.shape[1] - first.length, time.perf_counter() - first.over_s


def measure(model, prompts, extra, a):
    """Decode tokens/s of each repeat over all prompts, and every prompt's output."""
    rates, outputs = [], []
    for repeat in range(a.repeats + 1):  # the first one warms up
        tokens, spent_s, outputs = 0, 0.0, []
        for prompt in prompts:
            output, later_tokens, later_s = generated(model, prompt, a.new_tokens, extra)
            tokens, spent_s = tokens + later_tokens, spent_s + later_s
            outputs.append(output)
        if repeat:
            rates.append(tokens / spent_s)
    return rates, outputs


def methods(a, assistant):
    """name: (work item, what `generate` is given besides)."""
    found = {"plain": ("E3", {}), "lookup": ("E6", {"prompt_lookup_num_tokens": LOOKUP_TOKENS})}
    if a.static:
        found["static"] = ("E3", {"cache_implementation": "static"})
    if assistant is not None:
        found["assisted"] = ("E6", {"assistant_model": assistant})
    return found


FULL, DRY = {"contexts": [8000, 31000], "new_tokens": 256}, {"contexts": [224], "new_tokens": 12}


def arguments(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="a .gguf file or a Hugging Face folder")
    p.add_argument("--assistant", help="a smaller model with the same tokenizer")
    p.add_argument("--prompts", type=Path, help="what prompts.py wrote; its first prompts are used")
    p.add_argument("--out", type=Path)
    p.add_argument("--workloads", nargs="+", default=["code", "novel", "summary"])
    p.add_argument("--contexts", nargs="+", type=int, help="default 8000 31000; dry 224")
    p.add_argument("--documents", type=int, default=4, help="prompts, one after another, as real_text's B 1 has them")
    p.add_argument("--new-tokens", type=int, help="default 256; dry 12")
    p.add_argument("--repeats", type=int, default=2)
    p.add_argument("--static", action="store_true", help="also a static cache, compiled")
    p.add_argument("--dry", action="store_true", help="tiny, on the CPU, unrecorded")
    a = p.parse_args(argv)
    complete(p, a, DRY if a.dry else FULL, toy="dry" if a.dry else None)
    if not a.dry and not a.prompts:
        p.error("--prompts is missing: write them with benchmarks/engine/prompts.py")
    return a


def main(argv=None):
    a = arguments(argv)
    device, dtype = ("cpu", torch.float32) if a.dry else ("cuda", torch.bfloat16)
    tokenizer = tokenizer_of(a.model)
    model = hf_model(a.model, device, dtype)
    assistant = hf_model(a.assistant, device, dtype) if a.assistant else None
    records = []
    for workload in a.workloads:
        for context in a.contexts:
            ids, about = given(a.prompts, tokenizer, workload, context, count=a.documents, new_tokens=a.new_tokens)
            prompts = ids[: a.documents].tolist()
            greedy = None
            for name, (item, extra) in methods(a, assistant).items():
                rates, outputs = measure(model, prompts, extra, a)
                greedy = greedy or outputs  # plain comes first
                median = statistics.median(rates)
                records.append(
                    record(
                        f"{'dry-' if a.dry else ''}{item}-peer-{name}-{workload}-{context // 1000}k-B1",
                        f"transformers {name}, {Path(a.model).name}, {workload}, B 1, context {context}",
                        median, "tok/s", spread=[round(min(rates), 2), round(max(rates), 2)],
                        ms_per_token=round(1e3 / median, 4), documents=len(prompts),
                        differing_from_plain=sum(x != y for x, y in zip(outputs, greedy)),
                        about={**about, "new_tokens": a.new_tokens, "dtype": str(dtype).split(".")[1]},
                        transformers=transformers.__version__,
                        assistant=Path(a.assistant).name if name == "assisted" else None,
                    )
                )  # fmt: skip
                print(f"{records[-1]['id']:<44}{median:>9.2f} tok/s  {1e3 / median:.2f} ms a token", flush=True)
                if a.out:
                    save(records, a.out)
    close(records)
    return records


if __name__ == "__main__":
    script(main)

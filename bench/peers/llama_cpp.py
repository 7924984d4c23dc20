"""llama.cpp through llama-cpp-python, with the same weights in a GGUF file; one prompt at a time.

Options: ``chunk`` (prompt tokens per step). Keys and values are float32 with float32 weights, otherwise float16.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from peers import Outcome, Prompt, Run, Unavailable, Work, in_batches

try:
    import gguf
    import llama_cpp
    import torch
    from safetensors.torch import load_file
except ImportError as error:
    raise Unavailable(f"{error}; `make peers` builds llama-cpp-python in an environment of its own") from error

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def load(work: Work) -> Run:
    path = Path(work.model) / f"{work.dtype}.gguf"
    if not path.exists():
        convert(Path(work.model), path, work.dtype)
    kept = gguf.GGMLQuantizationType.F32 if work.dtype == "float32" else gguf.GGMLQuantizationType.F16
    model = llama_cpp.Llama(
        model_path=str(path),
        n_ctx=work.prompt_tokens + work.new_tokens,
        n_batch=work.options["chunk"],
        n_threads=work.threads,
        n_threads_batch=work.threads,
        type_k=kept.value,
        type_v=kept.value,
        verbose=False,
    )

    def one(prompt: Prompt, new_tokens: int) -> Outcome:
        model.reset()
        tokens: list[int] = []
        times: list[float] = []
        start = time.perf_counter()
        for token in model.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0):
            tokens.append(token)
            times.append(time.perf_counter())
            if len(tokens) == new_tokens:
                break
        tpot = [(times[-1] - times[0]) / (new_tokens - 1)] if new_tokens > 1 else []
        return Outcome(1, times[-1] - start, [tokens], [times[0] - start], tpot)

    return lambda prompts, new_tokens: in_batches(prompts, 1, work.limit_s, lambda part: one(part[0], new_tokens))


def convert(folder: Path, path: Path, dtype: str) -> None:
    """Write a Llama's weights as GGUF, without a vocabulary: prompts are token ids."""
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = paired(tensor, heads if "q_proj" in name else kv_heads)
        write(writer, gguf_name(name), tensor, dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """``model.layers.3.mlp.up_proj.weight`` is ``blk.3.ffn_up.weight``."""
    if not name.startswith("model.layers."):
        return NAMES[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[rest]}"


def paired(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head with the two halves of a rotation side by side, as this format's rotation wants them."""
    rows, width = weight.shape
    return weight.view(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width)


def write(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, dtype: str) -> None:
    """Matrices in the wanted type, vectors in float32."""
    if dtype == "bfloat16" and tensor.ndim > 1:
        bits = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, tensor.float().contiguous().numpy())

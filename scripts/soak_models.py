"""Three small random-weight bundles for `soak.py`: plain attention, normed queries, convolutions.

Written with torch and numpy alone: a header of JSON and the tensors behind it is all that a
safetensors file is.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN, WIDE, HEAD, HEADS, KV_HEADS, VOCAB = 96, 160, 16, 6, 2, 320
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_CONFIGS: dict[str, dict[str, object]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False},
    "lfm2": {
        "model_type": "lfm2",
        "tie_word_embeddings": True,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
        "conv_bias": False,
    },
}

Shapes = dict[str, tuple[int, ...]]


def make_models(root: Path) -> list[str]:
    """Write the bundles under `root`; their ids."""
    for seed, family in enumerate(_CONFIGS):
        folder = root / "soak" / family
        folder.mkdir(parents=True)
        _write(folder, family, seed)
    return [f"soak/{family}" for family in _CONFIGS]


def _write(folder: Path, family: str, seed: int) -> None:
    (folder / "config.json").write_text(json.dumps(_COMMON | _CONFIGS[family]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": _CHAT}))
    _tokenizer().save(str(folder / "tokenizer.json"))
    random = torch.Generator().manual_seed(seed)
    header: dict[str, object] = {}
    data = bytearray()
    for name, shape in _shapes(family).items():
        values = torch.randn(shape, generator=random) * 0.08
        if len(shape) == 1:
            values += 1.0
        raw = values.numpy().tobytes()
        place = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": place}
        data += raw
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data)


def _tokenizer() -> Tokenizer:
    """Every byte is a token; the vocabulary's rest is never said by a tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*_SPECIALS, *alphabet))}
    vocab |= {f"<unused{index}>": index for index in range(len(vocab), VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIALS])
    return tokenizer


def _shapes(family: str) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    if family == "lfm2":
        shapes["model.embedding_norm.weight"] = (HIDDEN,)
    else:
        shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    for layer in range(3):
        named = _lfm2_layer(layer) if family == "lfm2" else _decoder_layer(family)
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in named.items()}
    return shapes


def _attention(out: str) -> Shapes:
    queries, keys = HEADS * HEAD, KV_HEADS * HEAD
    return {
        "self_attn.q_proj": (queries, HIDDEN),
        "self_attn.k_proj": (keys, HIDDEN),
        "self_attn.v_proj": (keys, HIDDEN),
        f"self_attn.{out}": (HIDDEN, queries),
    }


def _decoder_layer(family: str) -> Shapes:
    shapes = _attention("o_proj") | {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (WIDE, HIDDEN),
        "mlp.up_proj": (WIDE, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDE),
    }
    if family == "qwen3":
        shapes |= {"self_attn.q_norm": (HEAD,), "self_attn.k_norm": (HEAD,)}
    return shapes


def _lfm2_layer(layer: int) -> Shapes:
    shapes: Shapes = {
        "operator_norm": (HIDDEN,),
        "ffn_norm": (HIDDEN,),
        "feed_forward.w1": (WIDE, HIDDEN),
        "feed_forward.w3": (WIDE, HIDDEN),
        "feed_forward.w2": (HIDDEN, WIDE),
    }
    if layer == 1:
        norms: Shapes = {"self_attn.q_layernorm": (HEAD,), "self_attn.k_layernorm": (HEAD,)}
        return shapes | _attention("out_proj") | norms
    return shapes | {
        "conv.conv": (HIDDEN, 1, 3),
        "conv.in_proj": (3 * HIDDEN, HIDDEN),
        "conv.out_proj": (HIDDEN, HIDDEN),
    }

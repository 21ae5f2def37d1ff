"""Small random embedding bundles for tests, whole folders as sentence-transformers writes them.

transformers makes the weights and is the oracle of what they give.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

WORDS = tuple("the cat sat on a mat and dog ran in rain sun moon sea to it was hot cold".split())  # noqa: SIM905

#: Sizes in each family's own spelling.
_SIZES = dict(
    vocab_size=320,
    hidden_size=48,
    intermediate_size=112,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=66,
    pad_token_id=1,
)
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {**_SIZES, "pad_token_id": 0, "layer_norm_eps": 1e-12},
    "roberta": {**_SIZES, "type_vocab_size": 1},
    "xlm-roberta": {**_SIZES, "type_vocab_size": 1},
    "camembert": {**_SIZES, "type_vocab_size": 1},
    "mpnet": {**_SIZES},
    "distilbert": dict(
        vocab_size=320, dim=48, hidden_dim=112, n_layers=3, n_heads=4, max_position_embeddings=66
    ),
}
DECODER = dict(
    vocab_size=320,
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=128,
)


def save_encoder(
    folder: Path,
    family: str = "bert",
    *,
    pooling: str = "mean_tokens",
    normalizes: bool = True,
    max_tokens: int | None = None,
    **changes: Any,
) -> Any:
    """Write a bundle; return transformers' model of it."""
    return _save(folder, family, {**FAMILIES[family], **changes}, pooling, normalizes, max_tokens)


def save_decoder(folder: Path, family: str = "qwen3", **changes: Any) -> Any:
    """One that pools its last token, saved without its head as such bundles are."""
    return _save(folder, family, {**DECODER, **changes}, "lasttoken", True, None)


def _save(
    folder: Path,
    family: str,
    config: dict[str, Any],
    pooling: str,
    normalizes: bool,
    max_tokens: int | None,
) -> Any:
    import transformers

    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(family, **config)
    model = transformers.AutoModel.from_config(made).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(3.0)
    model.save_pretrained(folder, safe_serialization=True)
    save_tokenizer(folder)
    modules = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    entries = [
        {"idx": i, "name": str(i), "path": paths[i], "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({f"pooling_mode_{pooling}": True, "pooling_mode_other": False})
    )
    if max_tokens is not None:
        (folder / "sentence_bert_config.json").write_text(
            json.dumps({"max_seq_length": max_tokens, "do_lower_case": False})
        )
    return model


def save_tokenizer(folder: Path) -> None:
    """WordPiece with [CLS] and [SEP] around a text; single letters make up what it lacks."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    pieces = [*marks, *letters, *(f"##{letter}" for letter in letters), *WORDS, ".", ","]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(marks)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.save(str(folder / "tokenizer.json"))


def reference(
    model: Any, ids: Sequence[int], pooling: str, *, normalizes: bool = True
) -> torch.Tensor:
    """The vector that sentence-transformers' arithmetic gives."""
    with torch.no_grad():
        hidden = model(input_ids=torch.tensor([list(ids)])).last_hidden_state[0]
    vector = {
        "mean_tokens": hidden.mean(0),
        "cls_token": hidden[0],
        "max_tokens": hidden.amax(0),
        "lasttoken": hidden[-1],
    }[pooling]
    return torch.nn.functional.normalize(vector, dim=0) if normalizes else vector

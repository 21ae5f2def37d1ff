"""SentencePiece vocabularies in the form that the `tokenizers` library works with.

Two ways in: pieces with scores (from a GGUF) become merges, and a `tokenizer.model` file
becomes a whole backend. SentencePiece's BPE joins the neighbours whose joint piece has the
highest score; written as merges that is every split of a piece into two, best score first.

File format: sentencepiece_model.proto of google/sentencepiece, read without a protobuf library.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers

from osaurus.errors import DamagedBundle, UnsupportedBundle

SPACE_MARK = "\u2581"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_BPE = 2
_DEFAULT_MODEL_TYPE = 1  #: unigram, the format's own default


def merges_from_scores(pieces: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All merges that can form `pieces`, in the order in which they are tried.

    Among splits of one piece the longer left half goes first: of two overlapping joins with
    the same result SentencePiece takes the left one.
    """
    best_first = sorted(pieces, key=lambda piece: (-scores[pieces[piece]], pieces[piece]))
    return [
        (piece[:cut], piece[cut:])
        for piece in best_first
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]


def space_normalizer(*, adds_space: bool) -> normalizers.Normalizer:
    """Spaces become the mark; a text that starts after a control token gets one in front."""
    mark = normalizers.Replace(" ", SPACE_MARK)
    return normalizers.Sequence([normalizers.Prepend(SPACE_MARK), mark]) if adds_space else mark


def piece_decoder(*, strips_space: bool) -> decoders.Decoder:
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips_space else steps)


@dataclass(slots=True)
class _Model:
    """What matters of a `tokenizer.model`. Defaults are the format's."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)
    model_type: int = _DEFAULT_MODEL_TYPE
    has_character_map: bool = False
    adds_space: bool = True
    removes_spaces: bool = True


def backend_from_model(path: Path) -> tokenizers.Tokenizer:
    """Build from a `tokenizer.model` or `spiece.model` file.

    Raises `UnsupportedBundle` for a file of another format (tiktoken ranks), and for unigram
    models and character maps: the library's versions of these differ from SentencePiece's on
    rare texts, and a bundle that needs them has a `tokenizer.json`.
    """
    try:
        model = _read_model(path.read_bytes())
    except (IndexError, ValueError, struct.error, OverflowError) as error:
        raise UnsupportedBundle(
            f"{path}: not a SentencePiece model; a bundle with tokenizer.json is needed"
        ) from error
    if not model.pieces:
        raise UnsupportedBundle(f"{path}: holds no pieces")
    if model.model_type != _BPE or model.has_character_map:
        kind = "a character map" if model.model_type == _BPE else "a model type other than BPE"
        raise UnsupportedBundle(
            f"{path}: has {kind}, which is supported through tokenizer.json only; convert the "
            "tokenizer or pull a repository that has that file"
        )
    try:
        backend = tokenizers.Tokenizer(_core(model))
    except Exception as error:  # the library raises nothing narrower
        raise DamagedBundle(f"{path}: the vocabulary is not consistent: {error}") from error
    backend.normalizer = _normalizer(model)
    backend.decoder = piece_decoder(strips_space=model.adds_space)
    backend.add_tokens(
        [
            AddedToken(text, special=kind != _USER_DEFINED, normalized=False)
            for text, _, kind in model.pieces
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    return backend


def _core(model: _Model) -> models.Model:
    unknown = next((i for i, piece in enumerate(model.pieces) if piece[2] == _UNKNOWN), None)
    normal = {text: i for i, (text, _, kind) in enumerate(model.pieces) if kind == _NORMAL}
    return models.BPE(
        vocab={text: i for i, (text, *_) in enumerate(model.pieces)},
        merges=merges_from_scores(normal, [score for _, score, _ in model.pieces]),
        unk_token=None if unknown is None else model.pieces[unknown][0],
        fuse_unk=True,
        byte_fallback=any(kind == _BYTE for *_, kind in model.pieces),
    )


def _normalizer(model: _Model) -> normalizers.Normalizer:
    mark = space_normalizer(adds_space=model.adds_space)
    if not model.removes_spaces:
        return mark
    patterns = ((Regex(r"\A +| +\z"), ""), (Regex(" {2,}"), " "))
    return normalizers.Sequence([*(normalizers.Replace(*pair) for pair in patterns), mark])


def _read_model(data: bytes) -> _Model:
    model = _Model()
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            model.pieces.append(_read_piece(value))
        elif number == 2 and isinstance(value, bytes):
            model_type = dict(_fields(value)).get(3)
            model.model_type = model_type if isinstance(model_type, int) else model.model_type
        elif number == 3 and isinstance(value, bytes):
            spec = dict(_fields(value))
            model.has_character_map = bool(spec.get(2))
            model.adds_space = bool(spec.get(3, 1))
            model.removes_spaces = bool(spec.get(4, 1))
    return model


def _read_piece(data: bytes) -> tuple[str, float, int]:
    entry = dict(_fields(data))
    text, score, kind = entry.get(1, b""), entry.get(2, b"\0\0\0\0"), entry.get(3, _NORMAL)
    if not (isinstance(text, bytes) and isinstance(score, bytes) and isinstance(kind, int)):
        raise ValueError("a piece of another shape")
    return text.decode(), struct.unpack("<f", score)[0], kind


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Protobuf's wire format: field numbers with a number or raw bytes."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        number, wire = tag >> 3, tag & 7
        if number == 0:
            raise ValueError("field number 0")
        if wire == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire == 2:
            length, position = _varint(data, position)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if position + length > len(data):
            raise ValueError("a field goes past the end")
        yield number, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")

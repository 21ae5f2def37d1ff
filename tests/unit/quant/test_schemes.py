"""Claims: matrices of other quantizers are read to the values those stand for, and the config
says which module is stored how.

compressed-tensors' own matrices lie in `tests/golden/compressed_tensors`; GPTQ and AWQ are
packed here, word by word, as their formats say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from osaurus.errors import UnsupportedBundle
from osaurus.quant.awq import Awq
from osaurus.quant.fp8 import Fp8
from osaurus.quant.gptq import Gptq
from osaurus.quant.grouped import GroupedWeight
from osaurus.quant.scheme import DTYPES, Scheme
from osaurus.quant.schemes import read_schemes

N, K = 16, 64


def decoded(scheme: Scheme, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> Any:
    """Decode, after the check of shapes and types that the loader does."""
    wanted = scheme.parts(*shape)
    for name, part in wanted.items():
        assert part.optional or name in parts, name
        if name in parts:
            assert tuple(parts[name].shape) in part.shapes, name
            assert parts[name].dtype in [DTYPES[dtype] for dtype in part.dtypes], name
    weight = scheme.decode({k: v for k, v in parts.items() if k in wanted}, shape)
    return weight.dequantize(torch.float32) if isinstance(weight, GroupedWeight) else weight


# --- compressed-tensors ---------------------------------------------------------------------

GOLDEN = Path(__file__).parents[2] / "golden" / "compressed_tensors" / "matrices.safetensors"
with safe_open(GOLDEN, "pt") as _file:
    GROUPS = json.loads(_file.metadata()["groups"])
    STORED = {name: _file.get_tensor(name) for name in _file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("form", GROUPS)
def test_compressed_tensors_are_read_to_the_packages_own_values(form: str) -> None:
    parts = {
        name.partition(".")[2]: tensor
        for name, tensor in STORED.items()
        if name.partition(".")[0] == form
    }
    wanted = parts.pop("dequantized")
    entry = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {"group_0": GROUPS[form]},
        "ignore": ["lm_head", "re:.*\\.gate$"],
    }
    schemes = read_schemes({"quantization_config": entry})
    assert schemes.of("lm_head") is None
    assert schemes.of("model.layers.0.mlp.gate") is None
    scheme = schemes.of("model.layers.0.mlp.gate_proj")
    assert scheme is not None
    assert scheme.marker in parts
    weight = decoded(scheme, parts, tuple(wanted.shape))
    # What is dense is rounded to bfloat16; the package computes FP4 in bfloat16 itself.
    tolerance = 2**-8 if weight.dtype == torch.bfloat16 or "fp4" in form else 1e-6
    torch.testing.assert_close(weight.float(), wanted, rtol=tolerance, atol=1e-7)


def test_the_first_group_whose_targets_fit_is_a_modules_own() -> None:
    int8 = {"targets": ["re:.*down_proj"], "weights": {"num_bits": 8, "strategy": "channel"}}
    int4 = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}
    entry = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"a": int8, "b": int4},
    }
    schemes = read_schemes({"quantization_config": entry})
    assert "8 bits in rows" in str(schemes.of("model.layers.0.mlp.down_proj"))
    assert "4 bits in groups of 32" in str(schemes.of("model.layers.0.mlp.up_proj"))


# --- GPTQ -----------------------------------------------------------------------------------


def words_along(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Codes packed along `dim` into 32-bit words, the first in the lowest bits."""
    lines = codes.movedim(dim, -1).reshape(-1, codes.shape[dim]).tolist()
    words = []
    for line in lines:
        total = sum(int(code) << (bits * i) for i, code in enumerate(line))
        count = len(line) * bits // 32
        words.append([(total >> (32 * i)) & 0xFFFFFFFF for i in range(count)])
    packed = torch.tensor(words, dtype=torch.int64)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)
    return packed.movedim(-1, dim) if dim == 1 else packed.t()


def gptq_parts(
    bits: int, group: int, less_one: bool, group_of: torch.Tensor
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A random matrix as GPTQ stores it, and its values [N, K]."""
    g = torch.Generator().manual_seed(bits)
    n = 32
    codes = torch.randint(0, 1 << bits, (n, K), generator=g)
    zeros = torch.randint(1, 1 << bits, (K // group, n), generator=g)
    scales = (torch.rand(K // group, n, generator=g) + 0.5).half() / (1 << bits)
    parts = {
        "qweight": words_along(codes.t().contiguous(), bits, 0),
        "qzeros": words_along(zeros - int(less_one), bits, 1),
        "scales": scales,
        "g_idx": group_of.int(),
    }
    values = (codes - zeros[group_of].t()) * scales[group_of].float().t()
    return parts, values


PLAIN = torch.arange(K) // 16
SHUFFLED = PLAIN[torch.randperm(K, generator=torch.Generator().manual_seed(0))]
UNEVEN = torch.where(torch.arange(K) < 20, 0, PLAIN)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("group_of", [PLAIN, SHUFFLED, UNEVEN], ids=["plain", "act", "uneven"])
def test_gptq_is_read_to_the_values_it_stands_for(
    bits: int, form: str, group_of: torch.Tensor
) -> None:
    entry = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": 16,
        "checkpoint_format": form,
        "desc_act": group_of is not PLAIN,
    }
    scheme = read_schemes({"quantization_config": entry}).of("model.layers.0.mlp.up_proj")
    assert isinstance(scheme, Gptq)
    parts, values = gptq_parts(bits, 16, form == "gptq", group_of)
    weight = scheme.decode(parts, (32, K))
    if group_of is UNEVEN:
        assert isinstance(weight, torch.Tensor)
        torch.testing.assert_close(weight.float(), values, rtol=2**-8, atol=1e-6)
        return
    assert isinstance(weight, GroupedWeight)
    assert (weight.order is None) == (group_of is PLAIN)
    torch.testing.assert_close(decoded(scheme, parts, (32, K)), values)
    del parts["g_idx"]
    if group_of is PLAIN:
        torch.testing.assert_close(decoded(scheme, parts, (32, K)), values)


def test_a_group_that_does_not_exist_is_refused() -> None:
    parts, _ = gptq_parts(4, 16, True, PLAIN)
    parts["g_idx"][3] = 4
    with pytest.raises(UnsupportedBundle, match="none of the 4"):
        Gptq(4, 16, True).decode(parts, (32, K))


# --- AWQ ------------------------------------------------------------------------------------


def awq_words(codes: torch.Tensor) -> torch.Tensor:
    """[R, N] codes to [R, N / 8] words, features in AutoAWQ's order of nibbles."""
    mixed = codes.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1)
    return words_along(mixed, 4, 1)


@pytest.mark.parametrize("group", [16, -1])
def test_awq_is_read_to_the_values_it_stands_for(group: int) -> None:
    g = torch.Generator().manual_seed(1)
    size = group if group > 0 else K
    codes = torch.randint(0, 16, (K, N), generator=g)
    zeros = torch.randint(0, 16, (K // size, N), generator=g)
    scales = torch.rand(K // size, N, generator=g).half()
    parts = {"qweight": awq_words(codes), "qzeros": awq_words(zeros), "scales": scales}
    entry = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    scheme = read_schemes({"quantization_config": entry}).of("model.layers.0.mlp.up_proj")
    assert isinstance(scheme, Awq)
    each = torch.arange(K) // size
    values = ((codes - zeros[each]) * scales[each].float()).t()
    torch.testing.assert_close(decoded(scheme, parts, (N, K)), values)


# --- FP8, ModelOpt --------------------------------------------------------------------------


def test_fp8_blocks_multiply_by_the_stored_inverse_scale() -> None:
    """A matrix that is not whole blocks, as DeepSeek-V3's `kv_a_proj_with_mqa`."""
    entry = {"quant_method": "fp8", "weight_block_size": [8, 32], "modules_to_not_convert": ["x"]}
    schemes = read_schemes({"quantization_config": entry})
    assert schemes.of("model.x.y") is None
    assert schemes.of("model.xy") is not None
    weight = torch.randn(20, 80).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 3)
    values = weight.float() * scale.repeat_interleave(8, 0)[:20].repeat_interleave(32, 1)[:, :80]
    scheme = schemes.of("model.layers.0.mlp.up_proj")
    assert scheme is not None
    got = decoded(scheme, {"weight": weight, "weight_scale_inv": scale}, (20, 80))
    assert torch.equal(got, values.bfloat16())


@pytest.mark.parametrize("shape", [(), (1,), (N, 1), (N,)])
def test_fp8_with_one_scale_a_matrix_or_a_row(shape: tuple[int, ...]) -> None:
    weight, scale = torch.randn(N, K).to(torch.float8_e4m3fn), torch.rand(shape)
    parts = {"weight": weight, "weight_scale": scale}
    values = weight.float() * (scale.view(-1, 1) if scale.numel() == N else scale)
    for entry in ({"quant_method": "fp8"}, {"quant_method": "modelopt", "quant_algo": "FP8"}):
        scheme = read_schemes({"quantization_config": entry}).of("model.layers.0.mlp.up_proj")
        assert isinstance(scheme, Fp8)
        assert torch.equal(decoded(scheme, parts, (N, K)), values.bfloat16())


def test_modelopts_second_scale_multiplies() -> None:
    entry = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
    schemes = read_schemes({"quantization_config": entry})
    assert schemes.of("lm_head") is None
    scheme = schemes.of("model.layers.0.mlp.up_proj")
    assert scheme is not None
    parts = {name.partition(".")[2]: t for name, t in STORED.items() if name.startswith("nvfp4.")}
    wanted = parts["dequantized"]
    ours = {
        "weight": parts["weight_packed"],
        "weight_scale": parts["weight_scale"],
        "weight_scale_2": 1 / parts["weight_global_scale"],
    }
    weight = decoded(scheme, ours, tuple(wanted.shape))
    torch.testing.assert_close(weight, wanted, rtol=2**-8, atol=1e-7)


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"quant_method": "bitsandbytes"}, r"'bitsandbytes' is not supported \(served: awq, "),
        ({"quant_method": "gptq", "bits": 5}, "GPTQ with bits 5"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size 128"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "'W4A8'"),
        ({"quant_method": "compressed-tensors"}, "without config_groups"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "marlin-24",
                "config_groups": {"a": {"weights": {"num_bits": 4, "strategy": "group"}}},
            },
            "'marlin-24' with 4 bits by group",
        ),
    ],
)
def test_a_quantization_we_lack_is_named(entry: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedBundle, match=words):
        read_schemes({"quantization_config": entry})


@pytest.mark.parametrize("pattern", ["re:(", "re:(a|aa)+$"])
def test_a_pattern_that_cannot_be_used_is_refused(pattern: str) -> None:
    entry = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"a": {"weights": {"num_bits": 4, "group_size": 32}}},
        "ignore": [pattern],
    }
    schemes = read_schemes({"quantization_config": entry})
    with pytest.raises(UnsupportedBundle, match="the pattern"):
        schemes.of("a" * 60 + "!")

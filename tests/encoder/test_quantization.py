from typing import Any

import pytest

from encoder.config import PRESETS
from encoder.config_files import parse_encoder_config
from encoder.errors import CheckpointError
from encoder.quantization import vision_layers
from tests.encoder.config_tables import ORIGINAL, with_vision

INT4_GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": INT4_GROUP},
}


def compressed(**settings: object) -> dict[str, Any]:
    return {**COMPRESSED, **settings}


@pytest.mark.parametrize(
    "scheme",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]},
        {"quant_method": "awq", "modules_to_not_convert": None},
        {"quant_method": "modelopt", "ignore": ["language_model.lm_head", "vision_tower*"]},
        {"quant_method": "modelopt", "ignore": ["mm_projector*"]},
        COMPRESSED,
        compressed(ignore=["lm_head", "re:.*self_attn.*"]),
        compressed(ignore=["re:.*vision_tower.*blocks[.]0[.].*", "re:.*mm_projector.*"]),
        compressed(config_groups={"group_0": {"targets": ["re:.*mlp[.]fc[01]$"]}}),
        compressed(config_groups={"group_0": {"weights": {"num_bits": 8}}}),
    ],
    ids=lambda scheme: str(scheme)[:60],
)
def test_a_scheme_that_covers_vision_layers_is_refused(scheme: dict[str, Any]) -> None:
    for data in ({**ORIGINAL, "quantization_config": scheme}, with_vision(ORIGINAL, quantization_config=scheme)):
        with pytest.raises(CheckpointError, match=r"quantization_config \(.*\) covers .* only plain weights"):
            parse_encoder_config(data)


@pytest.mark.parametrize(
    "scheme",
    [
        {"quant_method": "fp8", "modules_to_not_convert": ["model.vision_tower", "model.mm_projector"]},
        {"quant_method": "fp8", "ignored_layers": ["vision", "mm_projector"]},
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "llm_int8_skip_modules": ["vision_tower", "mm_projector"],
        },
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "vision_tower*", "mm_projector*"]},
        {"quant_method": "quark", "exclude": ["re:vision_tower.*", "*mm_projector*"]},
        {"quant_method": "gptq", "bits": 4},
        compressed(ignore=["lm_head", "re:.*vision_tower.*", "re:.*mm_projector.*"]),
        compressed(ignore=[name for names in vision_layers(3) for name in names[:1]]),
        compressed(ignore=[names[-1] for names in vision_layers(3)]),
        compressed(config_groups={"group_0": {"targets": ["re:.*mlp[.]experts[.].*"]}}),
    ],
    ids=lambda scheme: str(scheme)[:60],
)
def test_a_scheme_that_leaves_the_vision_layers_out_is_none_of_our_business(scheme: dict[str, Any]) -> None:
    assert parse_encoder_config({**ORIGINAL, "quantization_config": scheme}) == parse_encoder_config(ORIGINAL)


def test_a_scheme_of_the_text_model_is_none_of_our_business() -> None:
    text = {"text_config": {"hidden_size": 40, "quantization_config": COMPRESSED}}
    assert parse_encoder_config({**ORIGINAL, **text}) == parse_encoder_config(ORIGINAL)
    copied = {**ORIGINAL, **text, "quantization_config": COMPRESSED}
    assert parse_encoder_config(copied) == parse_encoder_config(ORIGINAL)
    with pytest.raises(CheckpointError, match="covers 14 of the vision layers"):
        parse_encoder_config({**copied, "quantization_config": compressed(format="other")})


@pytest.mark.parametrize(
    ("scheme", "named"), [("int4", "must be an object"), (compressed(ignore=["re:("]), "not a regular expression")]
)
def test_a_malformed_scheme_is_named(scheme: Any, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse_encoder_config({**ORIGINAL, "quantization_config": scheme})


def test_no_scheme_at_all() -> None:
    for nothing in (None, {}):
        assert parse_encoder_config({**ORIGINAL, "quantization_config": nothing}) == parse_encoder_config(ORIGINAL)


def test_the_older_name_of_the_setting() -> None:
    with pytest.raises(CheckpointError, match="compression_config"):
        parse_encoder_config({**ORIGINAL, "compression_config": COMPRESSED})


def test_layers_of_the_true_shape() -> None:
    layers = list(vision_layers(PRESETS["kimi-k2.5"].num_layers))
    assert len(layers) == 4 * 27 + 2
    assert layers[0][0] == "vision_tower.encoder.blocks.0.wqkv"
    assert "model.vision_tower.layers.26.mlp.fc2" in layers[107]
    assert layers[-1][0] == "mm_projector.proj.2"

import json
from dataclasses import FrozenInstanceError, asdict, replace

import pytest

from encoder.config import PRESETS, EncoderConfig, ProcessorConfig
from encoder.errors import CheckpointError


def test_presets_have_the_stated_shapes() -> None:
    tiny, true = PRESETS["moonvit-tiny"], PRESETS["kimi-k2.5"]
    assert (tiny.num_layers, tiny.hidden_size, tiny.num_heads, tiny.mlp_size, tiny.text_width) == (2, 128, 4, 512, 256)
    assert (true.num_layers, true.hidden_size, true.num_heads, true.mlp_size) == (27, 1152, 16, 4304)
    assert (true.text_width, true.head_dim, true.merged_width, true.patch_values) == (7168, 72, 4608, 588)
    assert {(config.pos_height, config.pos_width, config.pos_time) for config in PRESETS.values()} == {(64, 64, 4)}


@pytest.mark.parametrize("config", [PRESETS["moonvit-tiny"], ProcessorConfig()], ids=["encoder", "processor"])
def test_canonical_names_every_setting(config: EncoderConfig | ProcessorConfig) -> None:
    settings = json.loads(config.canonical())
    assert list(settings) == sorted(asdict(config))
    for name, value in asdict(config).items():
        changed = tuple(2 * part for part in value) if isinstance(value, tuple) else 2 * value
        assert replace(config, **{name: changed}).canonical() != config.canonical()


def test_canonical_form_is_frozen() -> None:
    """Fingerprints depend on it: a change here orphans every stored embedding."""
    assert ProcessorConfig().canonical() == (
        '{"frames_per_chunk":4,"frames_per_second":2.0,"image_mean":[0.5,0.5,0.5],"image_std":[0.5,0.5,0.5],'
        '"max_patches":16384,"max_patches_per_frame":4096,"max_patches_per_side":512,"merge_size":2,"patch_size":14}'
    )
    assert PRESETS["moonvit-tiny"].canonical() == (
        '{"hidden_size":128,"layer_norm_eps":1e-05,"merge_size":2,"mlp_size":512,"num_heads":4,"num_layers":2,'
        '"patch_size":14,"pos_height":64,"pos_time":4,"pos_width":64,"projector_layer_norm_eps":1e-05,'
        '"rope_theta":10000.0,"text_width":256}'
    )


def test_a_config_cannot_change() -> None:
    with pytest.raises(FrozenInstanceError):
        PRESETS["moonvit-tiny"].num_layers = 3


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(CheckpointError, match=r"num_layers must be positive.*text_width must be positive"):
        replace(PRESETS["moonvit-tiny"], num_layers=0, text_width=-1)


def test_heads_must_split_into_pairs_of_pairs() -> None:
    with pytest.raises(CheckpointError, match="multiple of 4 x num_heads"):
        replace(PRESETS["moonvit-tiny"], hidden_size=120)


def test_a_channel_without_spread_is_refused() -> None:
    with pytest.raises(CheckpointError, match="image_std"):
        ProcessorConfig(image_std=(0.5, 0.0, 0.5))

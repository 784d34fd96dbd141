"""Settings files of a checkpoint, as tables."""

from typing import Any

ORIGINAL: dict[str, Any] = {
    "model_type": "kimi_k25",
    "media_placeholder_token_id": 60,
    "vision_config": {
        "_attn_implementation": "flash_attention_2",
        "init_pos_emb_height": 8,
        "init_pos_emb_width": 10,
        "init_pos_emb_time": 2,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mm_hidden_size": 48,
        "mm_projector_type": "patchmerger",
        "patch_size": 14,
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-6,
        "text_hidden_size": 40,
        "video_attn_type": "spatial_temporal",
        "vt_hidden_size": 48,
        "vt_intermediate_size": 80,
        "vt_num_attention_heads": 2,
        "vt_num_hidden_layers": 3,
    },
}


def with_vision(data: dict[str, Any], **settings: object) -> dict[str, Any]:
    return {**data, "vision_config": {**data["vision_config"], **settings}}

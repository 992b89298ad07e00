"""Images, video, and images with text."""

from __future__ import annotations

from typing import Any

import torch

from zoo.decoders import IDS
from zoo.entry import ROWS, VOCABULARY, Batch, Entry, hugging_face, images

DROP = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
VIT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 4,
}
TOWER: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def pixels(step: int) -> Batch:
    """Images without labels."""
    return {"pixel_values": torch.randn(ROWS, 3, 32, 32)}


def captions(step: int) -> Batch:
    """Images with texts, for a contrastive loss."""
    ids = torch.randint(3, VOCABULARY, (ROWS, 12))
    ids[:, -1] = 2
    return {"input_ids": ids, "pixel_values": torch.randn(ROWS, 3, 32, 32), "return_loss": True}


def maps(step: int) -> Batch:
    """Images with a class for every pixel."""
    return {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": torch.randint(4, (ROWS, 32, 32))}


def video(step: int) -> Batch:
    """Four frames, of which every other tubelet is hidden."""
    mask = torch.zeros(ROWS, 32, dtype=torch.bool)
    mask[:, torch.randperm(32)[:16]] = True
    return {"pixel_values": torch.randn(ROWS, 4, 3, 32, 32), "bool_masked_pos": mask}


def trajectories(step: int) -> Batch:
    """States, actions and returns."""
    length = 8
    return {
        "states": torch.randn(ROWS, length, 5),
        "actions": torch.randn(ROWS, length, 3),
        "rewards": torch.randn(ROWS, length, 1),
        "returns_to_go": torch.randn(ROWS, length, 1),
        "timesteps": torch.arange(length).repeat(ROWS, 1),
    }


def action_loss(output: Any) -> torch.Tensor:
    """Squares of what the decision transformer predicts."""
    return output.action_preds.square().mean() + output.state_preds.square().mean()


TABLE: list[Entry] = [
    hugging_face("vit", "ViTForImageClassification", "ViTConfig", images(32), **VIT, **DROP),
    hugging_face("deit", "DeiTForImageClassification", "DeiTConfig", images(32), **VIT, **DROP),
    hugging_face(
        "beit",
        "BeitForImageClassification",
        "BeitConfig",
        images(32),
        **VIT,
        **DROP,
        drop_path_rate=0.2,
        use_relative_position_bias=True,
    ),
    hugging_face(
        "dinov2", "Dinov2ForImageClassification", "Dinov2Config", images(32), **VIT, **DROP, drop_path_rate=0.2
    ),
    hugging_face(
        "vit-mae",
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        pixels,
        **VIT,
        **DROP,
        decoder_hidden_size=32,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=64,
    ),
    hugging_face(
        "swin",
        "SwinForImageClassification",
        "SwinConfig",
        images(32),
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        drop_path_rate=0.2,
        hidden_dropout_prob=0.1,
        num_labels=4,
    ),
    hugging_face(
        "convnext",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        images(32),
        hidden_sizes=[8, 16, 16, 32],
        depths=[1, 1, 2, 1],
        drop_path_rate=0.2,
        num_labels=4,
    ),
    hugging_face(
        "resnet",
        "ResNetForImageClassification",
        "ResNetConfig",
        images(32),
        embedding_size=8,
        hidden_sizes=[16, 32],
        depths=[2, 2],
        layer_type="basic",
        num_labels=4,
    ),
    hugging_face(
        "regnet",
        "RegNetForImageClassification",
        "RegNetConfig",
        images(32),
        embedding_size=8,
        hidden_sizes=[16, 32],
        depths=[2, 2],
        groups_width=8,
        num_labels=4,
    ),
    hugging_face(
        "segformer",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        maps,
        num_encoder_blocks=2,
        depths=[2, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=32,
        drop_path_rate=0.1,
        num_labels=4,
    ),
    hugging_face(
        "mobilenet-v2",
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        images(32),
        depth_multiplier=0.25,
        num_labels=4,
    ),
    hugging_face(
        "poolformer",
        "PoolFormerForImageClassification",
        "PoolFormerConfig",
        images(32),
        hidden_sizes=[8, 16, 16, 32],
        depths=[1, 1, 1, 1],
        drop_path_rate=0.2,
        num_labels=4,
    ),
    hugging_face(
        "focalnet",
        "FocalNetForImageClassification",
        "FocalNetConfig",
        images(32),
        image_size=32,
        embed_dim=16,
        depths=[2, 1],
        hidden_sizes=[16, 32],
        focal_levels=[1, 1],
        focal_windows=[3, 3],
        drop_path_rate=0.1,
        num_labels=4,
    ),
    hugging_face(
        "clip",
        "CLIPModel",
        "CLIPConfig",
        captions,
        projection_dim=16,
        text_config={**TOWER, **IDS, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "attention_dropout": 0.1},
        vision_config={**TOWER, "image_size": 32, "patch_size": 8, "attention_dropout": 0.1},
    ),
    hugging_face(
        "siglip",
        "SiglipModel",
        "SiglipConfig",
        captions,
        text_config={**TOWER, **IDS, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "projection_size": 32},
        vision_config={**TOWER, "image_size": 32, "patch_size": 8},
    ),
    hugging_face(
        "videomae",
        "VideoMAEForPreTraining",
        "VideoMAEConfig",
        video,
        **{**VIT, "num_labels": 2},
        **DROP,
        num_frames=4,
        tubelet_size=2,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
        norm_pix_loss=False,
    ),
    hugging_face(
        "decision-transformer",
        "DecisionTransformerModel",
        "DecisionTransformerConfig",
        trajectories,
        loss_fn=action_loss,
        state_dim=5,
        act_dim=3,
        hidden_size=32,
        n_layer=2,
        n_head=2,
        n_positions=64,
        max_ep_len=16,
    ),
]

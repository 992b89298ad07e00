"""Encoders with decoders: text, speech, and time series; CTC."""

from __future__ import annotations

from typing import Any

import torch

from zoo.entry import ROWS, VOCABULARY, Batch, Entry, MakeBatch, hugging_face, pairs

TOKENS: dict[str, Any] = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
BART: dict[str, Any] = {
    **TOKENS,
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "dropout": 0.1,
}
LAYERDROP = {"encoder_layerdrop": 0.3, "decoder_layerdrop": 0.3}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
}
WAVES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "layerdrop": 0.3,
    "pad_token_id": 0,
    "mask_time_prob": 0.2,
    "mask_time_length": 2,
    "ctc_zero_infinity": True,
}
SERIES: dict[str, Any] = {
    "prediction_length": 6,
    "context_length": 12,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 2,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}


def waves(samples: int) -> MakeBatch:
    """``input_values`` [ROWS, samples] with five labels each, one of them padding."""

    def make(step: int) -> Batch:
        labels = torch.randint(1, 16, (ROWS, 5))
        labels[-1, -1] = -100
        return {"input_values": torch.randn(ROWS, samples), "labels": labels}

    return make


def mels(bins: int, frames: int) -> MakeBatch:
    """``input_features`` [ROWS, bins, frames] with labels."""
    return lambda step: {
        "input_features": torch.randn(ROWS, bins, frames),
        "labels": torch.randint(3, VOCABULARY, (ROWS, 8)),
    }


def frames(step: int) -> Batch:
    """``input_features`` [ROWS, frames, bins] with labels."""
    return {"input_features": torch.randn(ROWS, 48, 8), "labels": torch.randint(3, VOCABULARY, (ROWS, 8))}


def spectrograms(step: int) -> Batch:
    """Text to eight frames of speech."""
    return {"input_ids": torch.randint(3, VOCABULARY, (ROWS, 12)), "labels": torch.randn(ROWS, 8, 8)}


def series(step: int) -> Batch:
    """Past and future of a series with two features of time."""
    past, future = 15, 6
    return {
        "past_values": torch.randn(ROWS, past).exp(),
        "past_time_features": torch.randn(ROWS, past, 2),
        "past_observed_mask": torch.ones(ROWS, past),
        "future_values": torch.randn(ROWS, future).exp(),
        "future_time_features": torch.randn(ROWS, future, 2),
    }


def channels(step: int) -> Batch:
    """Past and future of two channels."""
    return {"past_values": torch.randn(ROWS, 24, 2), "future_values": torch.randn(ROWS, 6, 2)}


TABLE: list[Entry] = [
    hugging_face("t5", "T5ForConditionalGeneration", "T5Config", pairs(20, 12), **T5),
    hugging_face(
        "long-t5",
        "LongT5ForConditionalGeneration",
        "LongT5Config",
        pairs(24, 12),
        **T5,
        local_radius=4,
        encoder_attention_type="transient-global",
        global_block_size=4,
    ),
    hugging_face(
        "bart-layerdrop",
        "BartForConditionalGeneration",
        "BartConfig",
        pairs(20, 12),
        **BART,
        **LAYERDROP,
        attention_dropout=0.1,
    ),
    hugging_face("mbart-layerdrop", "MBartForConditionalGeneration", "MBartConfig", pairs(20, 12), **BART, **LAYERDROP),
    hugging_face("marian", "MarianMTModel", "MarianConfig", pairs(20, 12), **BART),
    hugging_face("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", pairs(20, 12), **BART),
    hugging_face(
        "m2m-100-layerdrop", "M2M100ForConditionalGeneration", "M2M100Config", pairs(20, 12), **BART, **LAYERDROP
    ),
    hugging_face(
        "led-layerdrop",
        "LEDForConditionalGeneration",
        "LEDConfig",
        pairs(16, 12),
        **BART,
        **LAYERDROP,
        attention_window=[4, 4],
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    hugging_face(
        "prophetnet",
        "ProphetNetForConditionalGeneration",
        "ProphetNetConfig",
        pairs(16, 12),
        **TOKENS,
        vocab_size=VOCABULARY,
        hidden_size=32,
        encoder_ffn_dim=64,
        num_encoder_layers=2,
        num_encoder_attention_heads=4,
        decoder_ffn_dim=64,
        num_decoder_layers=2,
        num_decoder_attention_heads=4,
        max_position_embeddings=64,
    ),
    hugging_face(
        "whisper-layerdrop",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        mels(8, 64),
        **{**BART, "max_position_embeddings": 64},
        **LAYERDROP,
        num_mel_bins=8,
        max_source_positions=32,
        max_target_positions=32,
        begin_suppress_tokens=None,
        suppress_tokens=None,
    ),
    hugging_face(
        "speech-to-text-layerdrop",
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        frames,
        **BART,
        **LAYERDROP,
        max_source_positions=64,
        max_target_positions=32,
        num_conv_layers=2,
        conv_kernel_sizes=(3, 3),
        conv_channels=16,
        input_feat_per_channel=8,
    ),
    hugging_face(
        "speecht5-layerdrop",
        "SpeechT5ForTextToSpeech",
        "SpeechT5Config",
        spectrograms,
        vocab_size=VOCABULARY,
        hidden_size=32,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=64,
        encoder_layerdrop=0.3,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=64,
        decoder_layerdrop=0.3,
        num_mel_bins=8,
        speech_decoder_prenet_units=16,
        speech_decoder_postnet_units=16,
        reduction_factor=2,
        max_speech_positions=64,
        max_text_positions=64,
        encoder_max_relative_position=8,
        use_guided_attention_loss=False,
        pad_token_id=0,
    ),
    hugging_face("wav2vec2-ctc-layerdrop", "Wav2Vec2ForCTC", "Wav2Vec2Config", waves(400), **WAVES),
    hugging_face("hubert-ctc-layerdrop", "HubertForCTC", "HubertConfig", waves(400), **WAVES),
    hugging_face(
        "wavlm-ctc-layerdrop", "WavLMForCTC", "WavLMConfig", waves(400), **WAVES, max_bucket_distance=16, num_buckets=16
    ),
    hugging_face("sew-ctc-layerdrop", "SEWForCTC", "SEWConfig", waves(400), **WAVES, squeeze_factor=2),
    hugging_face(
        "informer-layerdrop",
        "InformerForPrediction",
        "InformerConfig",
        series,
        **SERIES,
        **LAYERDROP,
        attention_type="prob",
        sampling_factor=2,
    ),
    hugging_face(
        "autoformer-layerdrop",
        "AutoformerForPrediction",
        "AutoformerConfig",
        series,
        **SERIES,
        **LAYERDROP,
        label_length=4,
        moving_average=5,
        autocorrelation_factor=2,
    ),
    hugging_face(
        "time-series-transformer",
        "TimeSeriesTransformerForPrediction",
        "TimeSeriesTransformerConfig",
        series,
        **SERIES,
        **LAYERDROP,
    ),
    hugging_face(
        "patchtst",
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        channels,
        num_input_channels=2,
        context_length=24,
        prediction_length=6,
        patch_length=4,
        patch_stride=4,
        d_model=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
        attention_dropout=0.1,
        ff_dropout=0.1,
        path_dropout=0.1,
    ),
    hugging_face(
        "patchtsmixer",
        "PatchTSMixerForPrediction",
        "PatchTSMixerConfig",
        channels,
        num_input_channels=2,
        context_length=24,
        prediction_length=6,
        patch_length=4,
        patch_stride=4,
        d_model=16,
        num_layers=2,
        dropout=0.1,
        mode="mix_channel",
        gated_attn=True,
    ),
]

"""Causal language models: base, LoRA, loading, export, model card."""

from .adapter_merge import AdapterVector, convert_dtype, write_merged
from .base_model import (
    BUILTIN_MODELS,
    Base,
    BaseFile,
    base_digests,
    base_manifest,
    cached_commit,
    check_fit,
    config_folder,
    configs_with_eos,
    context_of,
    fetch_model,
    hash_file,
    layers_of,
    load_tokenizer,
    manifest_digest,
    open_tokenizer,
    pin_revisions,
    prepare_base,
    vocabulary_of,
    width_of,
)
from .causal_lm import TextGenerator, load_model, open_vector
from .lora import add_adapters, base_parameter_name
from .model_card import RunSummary, package_versions, render_card
from .sliced_loss import (
    causal_model,
    check_packing_isolation,
    decoder_inputs,
    loss_sum,
    replaced_forward,
    token_losses,
)
from .trainable import (
    ParameterFiller,
    autocast_dtype,
    available_attention,
    build_on_meta,
    check_trainable,
    count_trainable,
    frozen_dtype,
    frozen_name,
    load_trained,
    meta_trained_model,
    open_trained,
    prepare_for_training,
    trained_dtype,
)

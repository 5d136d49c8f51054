"""Causal language models: base, LoRA, loading, export, model card."""

from .adapter_merge import AdapterVector, convert_dtype, write_merged
from .base_files import Base, BaseFile, base_digests, base_manifest, cached_commit, hash_file, manifest_digest
from .base_model import (
    BUILTIN_MODELS,
    check_fit,
    config_folder,
    configs_with_eos,
    context_of,
    fetch_model,
    layers_of,
    load_tokenizer,
    open_tokenizer,
    prepare_base,
    vocabulary_of,
    width_of,
)
from .causal_lm import TextGenerator, load_model, open_vector
from .lora import add_adapters, base_parameter_name
from .meta_init import ParameterFiller, build_on_meta, frozen_name
from .model_card import RunSummary, package_versions, render_card
from .packing_isolation import check_packing_isolation
from .revision_pinning import pin_revisions
from .sliced_loss import causal_model, decoder_inputs, loss_sum, replaced_forward, token_losses
from .trainable import (
    autocast_dtype,
    available_attention,
    check_trainable,
    count_trainable,
    frozen_dtype,
    load_trained,
    meta_trained_model,
    open_trained,
    prepare_for_training,
    trained_dtype,
)

"""Weights on disk: safetensors files, model folders, and parameters as one vector of P numbers."""

from .model_folder import (
    atomic_folder,
    check_config,
    check_model_folder,
    not_loadable,
    quiet_transformers,
    weights_file_in,
    write_model_files,
)
from .parameter_layout import GRADIENT_CHUNK, FlatParameters, Layout, layout_of
from .safetensors_files import (
    ADAPTER_FILE,
    CHECK,
    TENSOR_DTYPES,
    WEIGHTS_FILE,
    StoredTensor,
    TensorSpec,
    check_disk_space,
    float32_header,
    header_length,
    open_tensors,
    read_header,
    safetensors_header,
    safetensors_writer,
    stored_from_tensor,
    words_digest,
    write_safetensors,
)
from .stored_vector import StoredVector, meta_model, open_stored_vector, tied_names, vector_of_model

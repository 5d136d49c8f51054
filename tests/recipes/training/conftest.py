"""A tiny Llama in a folder."""

from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import CONFIGS


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("llama")
    transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]()).save_pretrained(folder)
    return folder

"""S2-Attention models in Hugging Face transformers. Importing this package is enough:

    import s2_megatron.huggingface
    model = AutoModelForCausalLM.from_pretrained(FOLDER, attn_implementation="s2")

It registers the model type `s2_gpt` and the attention `s2` (with its mask).
"""

from packaging.version import Version

try:
    import transformers as _transformers
except ImportError as error:
    raise ImportError(
        "s2_megatron.huggingface needs transformers 5.4 or later, which is not installed; pip install 's2-megatron[hf]'"
    ) from error
# setup.py says so, too; before it a configuration was no dataclass.
if Version(_transformers.__version__) < Version("5.4"):
    raise ImportError(
        f"s2_megatron.huggingface needs transformers 5.4 or later, found {_transformers.__version__}; "
        "pip install 's2-megatron[hf]'"
    )

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from s2_megatron.config.stored import MODEL_TYPE
from s2_megatron.huggingface.attention import register_attention
from s2_megatron.huggingface.cache import CACHE_ARGUMENT, S2Cache
from s2_megatron.huggingface.configuration import S2GPTConfig
from s2_megatron.huggingface.modeling import S2GPTForCausalLM, S2GPTModel

__all__ = ["CACHE_ARGUMENT", "MODEL_TYPE", "S2Cache", "S2GPTConfig", "S2GPTForCausalLM", "S2GPTModel"]

register_attention()
AutoConfig.register(MODEL_TYPE, S2GPTConfig, exist_ok=True)
AutoModel.register(S2GPTConfig, S2GPTModel, exist_ok=True)
AutoModelForCausalLM.register(S2GPTConfig, S2GPTForCausalLM, exist_ok=True)
# Folders have tensors of each expert, as those of Qwen3-MoE; transformers' experts are one tensor.
register_checkpoint_conversion_mapping(MODEL_TYPE, get_checkpoint_conversion_mapping("qwen3_moe"), overwrite=True)

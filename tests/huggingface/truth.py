"""What a model must compute: transformers' own Llama with its eager attention, each layer under an explicit mask that
is made from the layer's pattern, token by token, in fp32.

B batch, H query heads, T tokens.
"""

import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import eager_attention_forward

from s2_megatron.config.sparsity import LayerSparsity, ResolvedSparsity
from s2_megatron.patterns.ranges import make_range_pattern
from tests.huggingface.tiny import BLOCK, HEADS, KV_HEADS, config_of


def three_layers(stride: int = 4) -> ResolvedSparsity:
    """A dense layer, a window with stripes, and other stripes: three layers of which no two may be taken for one
    another."""
    narrow, wide = (
        make_range_pattern(
            block_size=BLOCK, num_heads=HEADS, num_kv_heads=KV_HEADS, ranges=((window, 1), (None, step)), base_offset=1
        )
        for window, step in ((1, stride), (2, 3))
    )
    layers = (LayerSparsity("D", None), LayerSparsity("S", narrow), LayerSparsity("S", wide))
    return ResolvedSparsity(layers, (), None, BLOCK, HEADS, KV_HEADS, 256)


def attended(pattern, texts: torch.Tensor) -> torch.Tensor:
    """bool [B, H, T, T]. texts: int [B, T], the number of the text that each column belongs to, -1: padding (which
    attends itself, so that its softmax is a number). Blocks count from the start of a text."""
    mask = torch.diag_embed(texts < 0)[:, None].repeat(1, HEADS, 1, 1)
    for row in range(len(texts)):
        for text in set(texts[row].tolist()) - {-1}:
            columns = (texts[row] == text).nonzero().flatten()
            for head in range(HEADS):
                for place, query in enumerate(columns.tolist()):
                    block = place // BLOCK
                    blocks = range(block + 1) if pattern is None else pattern.key_blocks(head, block).tolist()
                    for other in blocks:
                        mask[row, head, query, columns[other * BLOCK : min((other + 1) * BLOCK, place + 1)]] = True
    return mask


def stock_model(model, sparsity: ResolvedSparsity, implementation: str = "s2") -> LlamaForCausalLM:
    """transformers' Llama with the weights of a model of tiny.py, and the sparsity in its config."""
    left_out = ("model_type", "architectures", "qkv_bias", "qk_norm")
    settings = {key: value for key, value in config_of(sparsity).to_dict().items() if key not in left_out}
    llama = LlamaForCausalLM(LlamaConfig(**settings, attn_implementation=implementation))
    llama.load_state_dict(model.state_dict())
    return llama.eval()


def truth_of(model, sparsity: ResolvedSparsity, texts: torch.Tensor):
    """The stock Llama with the weights of `model` whose attention is eager, under the mask of `attended`. It takes rows
    of these texts. Positions run on over a row, which rotary embeddings cannot tell from positions of each text."""
    masks = [attended(layer.pattern, texts) for layer in sparsity.layers]

    def forward(module, query, key, value, attention_mask, scaling, **kwargs):
        bias = torch.zeros(masks[0].shape).masked_fill(~masks[module.layer_idx], float("-inf"))
        return eager_attention_forward(module, query, key, value, bias, scaling)

    AttentionInterface.register("truth", forward)
    return stock_model(model, sparsity, "truth")


def difference(logits: torch.Tensor, expected: torch.Tensor, texts: torch.Tensor) -> float:
    """The largest one at a token of a text."""
    return float((logits - expected).detach()[texts >= 0].abs().max())


NEAR = 1e-4  # of logits of about 8
